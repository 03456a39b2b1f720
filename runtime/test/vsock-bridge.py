"""What Firecracker does with its unix socket, over the kernel's own vsock: `CONNECT port` leads to that port of machine 1. A line on the standard input cuts all."""
import os, socket, sys, threading

open_now = set()


def pump(source, target):
    try:
        while True:
            data = source.recv(65536)
            if not data:
                break
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def serve(client):
    line = b""
    while not line.endswith(b"\n"):
        line += client.recv(1)
    machine = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    try:
        machine.connect((1, int(line.split()[1])))
    except OSError:
        client.close()
        return
    client.sendall(b"OK 1073741824\n")
    pair = (client, machine)
    open_now.add(pair)
    threads = [threading.Thread(target=pump, args=ends) for ends in (pair, pair[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    open_now.discard(pair)
    for one in pair:
        one.close()


def accept(server):
    while True:
        client, _ = server.accept()
        threading.Thread(target=serve, args=(client,), daemon=True).start()


server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(16)
threading.Thread(target=accept, args=(server,), daemon=True).start()
print("ready", flush=True)
for _ in sys.stdin:
    for pair in list(open_now):
        for one in pair:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
os._exit(0)
