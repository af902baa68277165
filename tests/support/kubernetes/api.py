"""The API of the stand-in for a cluster (`tests.support.kubernetes.cluster`): its paths, rights and TLS."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from tests.support.kubernetes.cluster import KubernetesCluster

NAMESPACE = "lab"
_PATHS = {
    "jobs": f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs",
    "pods": f"/api/v1/namespaces/{NAMESPACE}/pods",
    "trainjobs": f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs",
}
_VERBS = ["create", "delete", "get", "list", "watch"]


def status(message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "message": message}


def with_tls(socket: Any, folder: Path) -> Any:
    """With a certificate of our own, which is its own authority."""
    names = [str(folder / "key.pem"), str(folder / "ca.pem")]
    subject = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command = ["openssl", "req", "-x509", *curve, "-days", "2", *subject, "-keyout", names[0], "-out", names[1]]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(names[1], names[0])
    return context.wrap_socket(socket, server_side=True, do_handshake_on_connect=False)


def handler(cluster: KubernetesCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (found := _DISCOVERY.get(urlsplit(self.path).path)) is not None:
                if self._may("get", ""):
                    self._answer(200, found)
                return
            kind, name, query = self._asked()
            log = name.endswith("/log")
            name = name.removesuffix("/log")
            watches = query.get("watch") in ("true", "True", "1")
            verb = "get" if name else "watch" if watches else "list"
            if not self._may(verb, f"{kind}/log" if log else kind):
                return
            if log:
                self._send_log(name, query)
            elif name:
                self._answer(*cluster.find(kind, name))
            elif watches:
                since = query.get("resourceVersion", "")
                self._send_lines(cluster.watch(kind, query.get("labelSelector", ""), since))
            else:
                self._answer(*cluster.list(kind, query.get("labelSelector", "")))

        def do_POST(self) -> None:
            kind, _, query = self._asked()
            if self._may("create", kind):
                self._answer(*cluster.create(self._body(), is_strict=query.get("fieldValidation") == "Strict"))

        def do_DELETE(self) -> None:
            kind, name, _ = self._asked()
            if self._may("delete", kind):
                self._body()
                self._answer(*cluster.delete(kind, name))

        def _asked(self) -> tuple[str, str, dict[str, str]]:
            """Kind, name within the namespace, and query. What is not served has no kind that a role allows."""
            url = urlsplit(self.path)
            kind = next((kind for kind, path in _PATHS.items() if url.path.startswith(path)), url.path)
            return kind, url.path.removeprefix(_PATHS.get(kind, kind)).strip("/"), dict(parse_qsl(url.query))

        def _may(self, verb: str, resource: str) -> bool:
            """Whether the one who asks is known and may. resource: empty for what everybody known may ask."""
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if token not in cluster.users:
                self._answer(401, status("Unauthorized"))
                return False
            rules = cluster.users[token]
            cluster.asked.add((verb, resource))
            allowed = resource in (*_PATHS, "pods/log", "") and (
                not resource
                or rules is None
                or any(resource in one["resources"] and verb in one["verbs"] for one in rules)
            )
            if not allowed or (verb, resource) in cluster.refused:
                cluster.forbidden.add((verb, resource))
                self._answer(403, status(f'{resource} is forbidden: User cannot {verb} resource "{resource}"'))
                return False
            return True

        def _body(self) -> dict[str, Any]:
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

        def _send_log(self, name: str, query: Mapping[str, str]) -> None:
            if name not in cluster.pods:
                return self._answer(404, status(f'pods "{name}" not found'))
            return self._send_lines(cluster.log(name, query.get("sinceTime", ""), query.get("follow") == "true"))

        def _send_lines(self, lines: Iterator[str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            with suppress(OSError):
                for line in lines:
                    self.wfile.write(line.encode() + b"\n")
                    self.wfile.flush()

        def _answer(self, code: int, document: Mapping[str, Any]) -> None:
            with cluster.lock:
                data = json.dumps(document).encode()
            with suppress(OSError):
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Tests print what they need."""

    return Handler


def _resources(version: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    listed = [
        {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": name in _PATHS, "verbs": _VERBS}
        for name, kind in kinds.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


def _group(name: str) -> dict[str, Any]:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


_EXTENSIONS = "apiextensions.k8s.io"
_DISCOVERY: dict[str, dict[str, Any]] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": _resources("v1", {"pods": "Pod", "namespaces": "Namespace", "events": "Event"}),
    "/apis": {"kind": "APIGroupList", "groups": [_group("batch"), _group(_EXTENSIONS)]},
    "/apis/batch/v1": _resources("batch/v1", {"jobs": "Job"}),
    f"/apis/{_EXTENSIONS}/v1": _resources(
        f"{_EXTENSIONS}/v1", {"customresourcedefinitions": "CustomResourceDefinition"}
    ),
}
"""What a client asks about to know which kinds there are."""
