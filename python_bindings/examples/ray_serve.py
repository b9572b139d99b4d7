"""`bitnet serve` on a Ray cluster: replicas behind one address, which Ray restarts when they die.

    python ray_serve.py MODEL --replicas 4 --threads 8

All machines must see MODEL. The head of the cluster listens, and forwards requests to replicas. The answer to a request
does not depend on its replica.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Collection
from pathlib import Path

from ray import serve

from bitnet_runtime import Model
from bitnet_serve.application import Application
from bitnet_serve.options import Options


@serve.deployment
@serve.ingress()
class Replica:
    """The server without its socket, which belongs to Ray."""

    def __init__(self, path: str, threads: int, options: Options) -> None:
        self._path, self._threads, self._options = Path(path), threads, options

    def __serve_build_asgi_app__(self) -> Application:
        def load(look: bool, without: Collection[str]) -> Model:
            return Model.load(self._path, threads=self._threads, verify=not look)

        return Application({self._path.stem: load}, self._options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each; Ray finds the cores for them")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--api-key", action="append", default=[])
    args = parser.parse_args()
    options = Options(host=args.host, api_keys=args.api_key)
    most = options.parallel + options.queue  # the replica itself refuses further requests
    serve.start(http_options={"host": args.host, "port": args.port})
    replica = Replica.options(
        num_replicas=args.replicas, ray_actor_options={"num_cpus": args.threads}, max_ongoing_requests=most + 1
    )
    serve.run(replica.bind(args.model, args.threads, options), name="bitnet")
    print(f"Listening on http://{args.host}:{args.port}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
