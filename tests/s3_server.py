"""S3 on the loopback interface (moto's server): it may hold an upload back, refuse, or go away.

Bounded: it listens on 127.0.0.1 only, keeps everything in memory, and ends with its `with` block.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self
from urllib.request import Request, urlopen

from werkzeug.serving import make_server
from werkzeug.wrappers import Response

HELD_S = 60.0


class S3Server:
    """`held` is set when an upload that matches `hold` has arrived; it then waits for `release`."""

    def __init__(self) -> None:
        # Here, because these take long: every test process reads this file.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.hold: str | None = None
        self.held, self.release, self.gone = (threading.Event() for _ in range(3))
        self.error = ""  # the code that each call is answered with
        self.refused = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address, "AWS_ACCESS_KEY_ID": "loopback",
            "AWS_SECRET_ACCESS_KEY": "loopback-secret-9071", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }  # fmt: skip

    def names(self, bucket: str = "bucket") -> list[str]:
        """The objects of a bucket."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, name: str, bucket: str = "bucket") -> str:
        """The text of an object; empty if there is none."""
        if name not in self.names(bucket):
            return ""
        return str(self._client.get_object(Bucket=bucket, Key=name)["Body"].read().decode())

    def write(self, name: str, text: str, bucket: str = "bucket") -> None:
        self._client.put_object(Bucket=bucket, Key=name, Body=text.encode())

    def __enter__(self) -> Self:
        import boto3
        from s3fs import S3FileSystem

        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._client = boto3.client(
            "s3", endpoint_url=self.address, region_name="us-east-1",
            aws_access_key_id="loopback", aws_secret_access_key="loopback-secret-9071",
        )  # fmt: skip
        S3FileSystem.clear_instance_cache()  # they know the address of an earlier server
        # All servers of a process share what moto keeps.
        urlopen(Request(f"{self.address}/moto-api/reset", method="POST"), timeout=10).close()
        self._client.create_bucket(Bucket="bucket")
        return self

    def __exit__(self, *error: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: dict[str, Any], answer: Callable[..., Any]) -> Iterable[bytes]:
        if self.gone.is_set() or self.error:
            self.refused += 1
            text = f"<Error><Code>{self.error}</Code><Message>so: {self.error}</Message></Error>"
            status = 503 if self.gone.is_set() else 403
            return Response(text, status, content_type="application/xml")(environ, answer)
        is_upload = environ["REQUEST_METHOD"] == "PUT"
        if is_upload and self.hold and re.search(self.hold, environ["PATH_INFO"]):
            self.held.set()
            self.release.wait(HELD_S)
        return self._app(environ, answer)
