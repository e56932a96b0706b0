#!/usr/bin/env bash
# Guess: with `timeout_keep_alive=1` uvicorn ends a connection on which nothing comes for a second.
# Versions: uvicorn 0.54.0, h11 0.16.0, Python 3.11, Linux.
# Behaviour: it ends one that has asked something before. One that was opened and has asked nothing yet stays, and so
# does one with the first line of a request: no setting limits the time of a request's header or body.
# Output seen:
#   asked once, then quiet: ended
#   opened, then quiet: open after 5 s
# Exits with 0 while this is so, and with 1 if it changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check uvicorn==0.54.0 h11==0.16.0
"$place/venv/bin/python" - <<'PROGRAM'
import socket
import sys
import threading
import time

import uvicorn


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


listening = socket.create_server(("127.0.0.1", 0))
config = uvicorn.Config(app, http="h11", lifespan="off", log_level="error", timeout_keep_alive=1)
server = uvicorn.Server(config)
thread = threading.Thread(target=server.run, args=([listening],))
thread.start()
while not server.started:
    time.sleep(0.05)
asked, quiet = (socket.create_connection(listening.getsockname()) for _ in range(2))
asked.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
assert asked.recv(4096).startswith(b"HTTP/1.1 200")
time.sleep(5)


def ended(line):
    line.settimeout(0.5)
    try:
        while data := line.recv(4096):
            assert data.endswith(b"ok")
        return True
    except TimeoutError:
        return False


found = ended(asked), ended(quiet)
print("asked once, then quiet:", "ended" if found[0] else "open after 5 s")
print("opened, then quiet:", "ended" if found[1] else "open after 5 s")
for line in (asked, quiet):
    line.close()
server.should_exit = True
thread.join()
sys.exit(0 if found == (True, False) else 1)
PROGRAM
