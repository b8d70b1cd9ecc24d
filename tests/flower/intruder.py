"""Another user of the machine: reads command lines, asks every port it finds there for a task, opens every file.

Runs until its standard input is closed, then prints what it got. It trusts any certificate, as an intruder would.
"""

import json
import os
import re
import select
import sys
from collections import Counter
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

ADDRESS = re.compile(r"--runtime-api-address[\0=]([\w.:\[\]]+)")
TYPES = ["flwr-clientapp", "flwr-serverapp"]
HEADERS = {
    "content-type": PROTOBUF_MEDIA_TYPE,
    **dict(RuntimeVersionMetadata.from_local_component("flower-superexec").as_metadata()),
}


def command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return [line for line in found if "flwr" in line or "flower" in line]


def readable(folder: Path) -> list[str]:
    """Return what this user can open or list below a folder."""
    found = []
    for place in (folder, *folder.rglob("*")):
        try:
            if place.is_dir():
                found += [str(place)] if [*place.iterdir()] else []
            else:
                place.open("rb").close()
                found.append(str(place))
        except OSError:
            continue
    return found


def main(folder: Path) -> None:
    statuses, tasks, lines, opened = Counter[str](), list[str](), set[str](), set[str]()
    body = AcquireTaskRequest(supported_task_types=TYPES).SerializeToString()
    with httpx.Client(verify=False, timeout=2) as client:
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            lines |= {*command_lines()}
            opened |= {*readable(folder)}
            for address in {match for line in lines for match in ADDRESS.findall(line)}:
                for scheme in ("http", "https"):
                    for path in ("runtime/acquire-task", "control/list-runs", "control/start-run"):
                        try:
                            answer = client.post(f"{scheme}://{address}/v1/{path}", content=body, headers=HEADERS)
                        except httpx.HTTPError:
                            continue
                        statuses[f"{path} {answer.status_code}"] += 1
                        if answer.is_success and path.startswith("runtime"):
                            task = AcquireTaskResponse.FromString(answer.content)
                            tasks += [task.token] if task.token else []
    got = {"user": os.geteuid(), "statuses": statuses, "tasks": tasks, "lines": [*lines], "opened": [*opened]}
    sys.stdout.write(json.dumps(got) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
