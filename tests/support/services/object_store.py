"""A real S3 server (moto's) on loopback, behind a proxy that fails as servers and networks do."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from infra.io import s3

Fault = Callable[["Proxy"], bool]
"""Answers a request itself and returns True, or changes how it is answered and returns False."""


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to moto, but for those that the next fault of the server takes."""

    protocol_version = "HTTP/1.1"
    cut_after: int | None = None
    stall_s = 0.0
    flips = False
    loses = False

    def do_GET(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def do_PUT(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_DELETE(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        server: Any = self.server
        self.cut_after, self.stall_s, self.flips, self.loses = (
            None,
            0.0,
            False,
            False,
        )  # one connection brings several requests
        server.requests.append(f"{self.command} {self.path}" if self.command != "GET" else self.path)
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if server.tears in f"{self.command} {self.path}" and self.command == "PUT":
            cut_off(self)
        elif "list-type" not in self.path and server.faults and server.faults.pop(0)(self):
            return
        time.sleep(server.latency_s)
        if sent and self.cut_after is not None:
            self._tear(sent[: self.cut_after])
            return
        connection = http.client.HTTPConnection("127.0.0.1", server.upstream)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        connection.request(self.command, self.path, sent or None, headers)
        answer = connection.getresponse()
        body = answer.read()
        if self.loses:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if self.flips:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.end_headers()
        if self.cut_after is not None:
            self.wfile.write(body[: self.cut_after])
            self.wfile.flush()
            time.sleep(self.stall_s)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(body)

    def _tear(self, part: bytes) -> None:
        """Leaves the beginning of an upload as if it were all of it, and breaks the connection: the worst server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream)  # type: ignore[attr-defined]
        connection.request(self.command, self.path, part)
        connection.getresponse().read()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        return None


def unavailable(proxy: Proxy) -> bool:
    return _answer(proxy, 503, "SlowDown", "Please reduce your request rate.")


def refused(proxy: Proxy) -> bool:
    return _answer(proxy, 403, "AccessDenied", "Access Denied")


def knows_no_upload(proxy: Proxy) -> bool:
    return _answer(proxy, 404, "NoSuchUpload", "The upload does not exist.")


def _answer(proxy: Proxy, status: int, code: str, message: str) -> bool:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    proxy.send_response(status)
    proxy.send_header("Content-Length", str(len(body)))
    proxy.end_headers()
    proxy.wfile.write(body)
    return True


def silent(proxy: Proxy) -> bool:
    """Answers nothing until the client gives up, after STEMMA_S3_READ_TIMEOUT_S seconds."""
    proxy.connection.recv(1)
    proxy.close_connection = True
    return True


def cut_off(proxy: Proxy) -> bool:
    proxy.cut_after = 100
    return False


def stalls(proxy: Proxy) -> bool:
    """Sends a beginning, nothing for a second, and breaks the connection."""
    proxy.cut_after, proxy.stall_s = 100, 1.0
    return False


def flips_a_bit(proxy: Proxy) -> bool:
    proxy.flips = True
    return False


def loses_the_answer(proxy: Proxy) -> bool:
    """Does what was asked, and breaks the connection before it answers."""
    proxy.loses = True
    return False


@contextmanager
def object_store() -> Iterator[int]:
    """The port of a real server."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@contextmanager
def bucket(port: int, name: str) -> Iterator[Any]:
    """A client of the server itself, with an empty bucket of this name."""
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=name)
    yield client
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
        for row in page.get("Contents", []):
            client.delete_object(Bucket=name, Key=row["Key"])
    client.delete_bucket(Bucket=name)


@contextmanager
def failing_proxy(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A proxy before the server at this port, which the environment names; its `faults` take one request each, in
    their order, `latency_s` is added to every answer, `requests` are the paths asked for, and uploads to paths with
    `tears` in them are all cut."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.upstream, server.faults, server.requests, server.latency_s = port, [], [], 0.0
    server.tears = "nothing"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "3",
        # What a busy machine delays is no fault that a test put there: a second try would take the next one's fault.
        "STEMMA_S3_READ_TIMEOUT_S": "60",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3, "FIRST_PAUSE_S", 0.01)
    s3.client.cache_clear()
    yield server
    s3.client.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()
