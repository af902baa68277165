"""The API of a Kubernetes cluster, as far as a training needs it: authentication, requests, and following logs.

Within a pod the API is found by the pod's service account, elsewhere by a kubeconfig (KUBECONFIG, else ~/.kube/config).
Credentials are tokens, client certificates, or a program that gives one of them (exec), as on managed clusters.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from infra.errors import stage_error
from infra.io.json import parse_json
from infra.io.yaml import read_plain, read_text

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 30.0
SILENT_S = 120.0
_EXEC_S = 60.0


class KubeError(Exception):
    """The API refused a request. status: HTTP status; 0 if the API gave no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubeApi:
    """One cluster, as one user. namespace: that user's default namespace."""

    def __init__(self, server: str, user: Mapping[str, Any], context: ssl.SSLContext | None, namespace: str) -> None:
        """Create a client. user: entry of a kubeconfig, with paths made absolute. context: None for http."""
        self.server = server.rstrip("/")
        self.namespace = namespace
        self._user = dict(user)
        self._context = context
        self._given: dict[str, Any] | None = None
        if self._has_certificate(self._user):
            self._load_certificate(self._user)

    @classmethod
    def find(cls, name: str | None = None) -> KubeApi:
        """Return the API of a context.

        name: of a context in the kubeconfig; by default its current one, or this pod's own cluster.

        Raises StageError: `no_kubernetes` if there is neither, `bad_kubeconfig` for a file that cannot be used.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if name is None and "KUBECONFIG" not in os.environ and host and (SERVICE_ACCOUNT / "token").exists():
            port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            context = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
            namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
            user = {"tokenFile": str(SERVICE_ACCOUNT / "token")}
            return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", user, context, namespace)
        kubeconfig = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        try:
            return cls._of_kubeconfig(name, kubeconfig)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise stage_error(
                "bad_kubeconfig",
                kubeconfig,
                f"expected a kubeconfig whose context, cluster, user and certificates can be read: {detail}",
                "`kubectl --context NAME get pods` with the same KUBECONFIG has to work",
            ) from None

    @classmethod
    def _of_kubeconfig(cls, name: str | None, kubeconfig: str) -> KubeApi:
        merged: dict[str, dict[str, Any]] = {"contexts": {}, "clusters": {}, "users": {}}
        current = name or ""
        for path in [Path(part) for part in kubeconfig.split(os.pathsep) if part and Path(part).exists()]:
            document = read_plain(read_text(path)) or {}
            current = current or document.get("current-context") or ""
            for kind, entries in merged.items():
                for entry in document.get(kind) or ():
                    entries.setdefault(entry["name"], _absolute(entry[kind[:-1]], path.parent))
        context = merged["contexts"].get(current)
        if context is None or context["cluster"] not in merged["clusters"]:
            expected = f"the context {current}" if current else "a current context"
            raise stage_error(
                "no_kubernetes",
                "launch.kubernetes.context" if name else "launch.cluster",
                f"expected {expected} in the kubeconfig at {kubeconfig}, or a pod with a service account",
                "set KUBECONFIG, or run in a pod that may create jobs",
            )
        cluster = merged["clusters"][context["cluster"]]
        user = merged["users"].get(context.get("user", ""), {})
        trusted = None
        if cluster["server"].startswith("https"):
            data = cluster.get("certificate-authority-data")
            trusted = ssl.create_default_context(
                cafile=cluster.get("certificate-authority"), cadata=base64.b64decode(data).decode() if data else None
            )
            if cluster.get("insecure-skip-tls-verify"):
                trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        return cls(cluster["server"], user, trusted, context.get("namespace") or "default")

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """Return the answer's document. Raises KubeError."""
        with self._open(method, path, body, query, TIMEOUT_S) as answer:
            try:
                return dict(parse_json(answer.read()))
            except (OSError, ValueError, TypeError, HTTPException) as error:  # it was cut off, or a proxy gave it
                raise KubeError(0, f"{self.server} gave no whole answer: {type(error).__name__}: {error}") from None

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Yield the lines of a text that may still grow.

        It ends with the text or the connection, or once nothing has come for SILENT_S: a connection that broke without
        notice looks the same.
        """
        with self._open("GET", path, None, query, SILENT_S) as answer, suppress(OSError, HTTPException):
            for line in answer:
                yield line.decode("utf8", errors="replace").rstrip("\n")

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str], timeout_s: float
    ) -> Any:
        url = f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")
        data = json.dumps(body).encode() if body is not None else None
        for is_last in (False, True):
            headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
            if token := self._token():
                headers["Authorization"] = f"Bearer {token}"
            request = urllib.request.Request(url, data, headers, method=method)
            try:
                return urllib.request.urlopen(request, timeout=timeout_s, context=self._context)
            except urllib.error.HTTPError as error:
                if error.code == 401 and self._given is not None and not is_last:
                    self._given = None  # what the program gave is no longer good
                    continue
                raise KubeError(error.code, _error_message(error)) from None
            except (OSError, HTTPException) as error:
                raise KubeError(0, f"{self.server} gave no answer: {getattr(error, 'reason', error)}") from None
        raise AssertionError("not reached")

    def _token(self) -> str:
        if path := self._user.get("tokenFile"):
            try:
                return Path(path).read_text().strip()  # it is renewed in place
            except OSError as error:
                raise KubeError(0, f"the token cannot be read: {error}") from None
        if "exec" in self._user:
            if self._given is None:
                self._given = _run_credential_plugin(self._user["exec"])
                if self._has_certificate(self._given):
                    self._load_certificate(self._given)
            return str(self._given.get("token") or "")
        return str(self._user.get("token") or "")

    @staticmethod
    def _has_certificate(user: Mapping[str, Any]) -> bool:
        return any(name.startswith(("client-certificate", "clientCertificate")) for name in user)

    def _load_certificate(self, user: Mapping[str, Any]) -> None:
        """Load a client certificate, by way of files: Python reads certificates from nothing else."""
        if self._context is None:
            return
        with tempfile.TemporaryDirectory(prefix="stemma-") as folder:
            paths = []
            for name, field in (("client-certificate", "clientCertificateData"), ("client-key", "clientKeyData")):
                data = base64.b64decode(user.get(f"{name}-data", "")) or user.get(field, "").encode()
                path = Path(folder) / name
                path.touch(0o600)
                path.write_bytes(data or Path(user[name]).read_bytes())
                paths.append(str(path))
            self._context.load_cert_chain(*paths)


def _absolute(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the paths of an entry, which are relative to the folder of the kubeconfig."""
    files = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
    return {name: str(folder / value) if name in files and value else value for name, value in entry.items()}


def _run_credential_plugin(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the credentials that a credential program gives (client.authentication.k8s.io)."""
    command = [plugin["command"], *(plugin.get("args") or ())]
    environment = {variable["name"]: variable["value"] for variable in plugin.get("env") or ()}
    credential_request = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    variables = {**os.environ, **environment, "KUBERNETES_EXEC_INFO": json.dumps(credential_request)}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=_EXEC_S, check=True)
        return dict(parse_json(answer.stdout)["status"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise KubeError(0, f"the kubeconfig's program {command[0]} gave no credentials: {detail}") from None


def _error_message(error: urllib.error.HTTPError) -> str:
    """Return the message of the API's Status document, else the HTTP reason."""
    with suppress(ValueError, OSError, AttributeError):
        return str(parse_json(error.read()).get("message") or error.reason)
    return str(error.reason)
