"""A service as sandboxes have it: for each byte that comes a millisecond of work, then a byte back. On the socket that it is told."""

import hashlib
import socket
import sys

REQUEST = b"request!" * (1 << 17)

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(8)
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    with client:
        # Several requests may come at once.
        while asked := client.recv(64):
            for _ in asked:
                hashlib.sha256(REQUEST).digest()
                client.send(b".")
