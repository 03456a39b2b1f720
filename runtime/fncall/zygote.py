"""The interpreter that stays in a container of a FnCall pool; runtime/agent/src/task/zygote.rs is its other end.

It imports what it is told to, does some times what every script does, so that what the interpreter learns from that is there for all forks, and is forked
for each task. A fork enters the task's namespaces, waits until it is in the task's control group, gives up its rights, and becomes `python FILE ARGUMENT...`,
as far as a program can tell. This process itself never runs anything of a task; it tells how the fork ended, whose parent it is.
"""
import atexit, base64, ctypes, gc, importlib, io, json, os, random, resource, socket, struct, sys, time, types

NEWPID = 0x20000000


def text(data, at):
    (length,) = struct.unpack_from('<I', data, at)
    return os.fsdecode(data[at + 4:at + 4 + length]), at + 4 + length


def texts(data, at):
    (count,) = struct.unpack_from('<I', data, at)
    found, at = [], at + 4
    for _ in range(count):
        one, at = text(data, at)
        found.append(one)
    return found, at


def whole(channel, length):
    data = b''
    while len(data) < length:
        part = channel.recv(length - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def close_from(first):
    check(CALL(436, first, 0xffffffff, 0))  # close_range


def refuse_shared():
    """Memory that all forks could write to would lead from one task to another."""
    with open('/proc/self/maps') as file:
        for line in file:
            if line.split(None, 2)[1] == 'rw-s':
                sys.exit('an imported module shares memory, which forks would share too: ' + line.strip())


class Program(ctypes.Structure):
    _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.c_char_p)]


def take_filter(rules):
    check(LIBC.prctl(22, 2, ctypes.byref(Program(len(rules) // 8, rules)), 0, 0))


def stay():
    """Returns in a fork, with the end of its socket and what it needs."""
    with open(4, 'rb') as file:
        file.seek(0)
        setup = file.read()
    uid, gid = struct.unpack_from('<II', setup)
    config = json.loads(setup[8:])
    rules = {name: base64.b64decode(text) for name, text in config['filters'].items()}
    for name in config['imports']:
        importlib.import_module(name)
    refuse_shared()
    libc = LIBC
    control = socket.socket(fileno=3)
    own = os.open('/proc/self/ns/pid', os.O_RDONLY)
    make_streams()
    for _ in range(REHEARSALS):
        rehearse()
    check(libc.prctl(38, 1, 0, 0, 0))  # no_new_privs
    take_filter(rules['whole but setns'])
    gc.collect()
    gc.freeze()
    control.send(b'r')
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not data:
            os._exit(0)
        place, end = fds
        check(libc.setns(place, NEWPID))
        child = os.fork()
        if child == 0:
            break
        check(libc.setns(own, NEWPID))
        os.close(place)
        os.close(end)
        _, status, used = os.wait4(child, 0)
        control.send(b'x' + struct.pack('<iQ', status, int((used.ru_utime + used.ru_stime) * 1000000)))
    check(libc.setns(place, config['namespaces'] & ~NEWPID))
    # What leads to the container and to what is beside the task: it has none of it from here on.
    control.detach()
    os.dup2(end, 3)
    close_from(4)
    channel = socket.socket(fileno=3)
    channel.send(b'p' + struct.pack('<i', os.getpid()))
    whole(channel, 1)
    score = os.open('/proc/self/oom_score_adj', os.O_WRONLY)
    os.write(score, b'500')
    os.close(score)
    os.setsid()
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    take_filter(rules['setns'])  # before anybody may look into it
    check(libc.prctl(4, 1, 0, 0, 0))  # its own /proc/self belongs to it
    channel.send(b'd')
    return channel


def become(channel):
    """Takes up what the task says. The script's path."""
    data, fds, _, _ = socket.recv_fds(channel, 65536, 3)
    if not data:
        os._exit(0)
    data += whole(channel, 4 - min(4, len(data)))
    (length,) = struct.unpack_from('<I', data)
    data = data[4:] + whole(channel, length - len(data) + 4)
    args, at = texts(data, 0)
    env, at = texts(data, at)
    cwd, at = text(data, at)
    (count,) = struct.unpack_from('<I', data, at)
    at += 4
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    channel.detach()
    close_from(3)
    for _ in range(count):
        which, soft, hard = struct.unpack_from('<IQQ', data, at)
        at += 20
        most = resource.getrlimit(which)[1] % 2 ** 64
        known = lambda value: resource.RLIM_INFINITY if value >= 2 ** 63 else value
        hard = min(hard, most)
        resource.setrlimit(which, (known(min(soft, hard)), known(hard)))
    os.chdir(cwd)
    os.umask(0o022)
    zone = os.environ.get('TZ')
    os.environ.clear()
    for entry in env:
        name, _, value = entry.partition('=')
        os.environ[name] = value
    if os.environ.get('TZ') != zone:
        time.tzset()
    sys.argv = args
    sys.path[0] = os.path.dirname(os.path.abspath(args[0]))
    # `random` does so itself, at each fork.
    for name in ('numpy.random', 'torch'):
        if name in sys.modules:
            sys.modules[name].seed()
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = STREAMS
    if 'PYTHONUNBUFFERED' in os.environ:
        sys.stdout.reconfigure(write_through=True)
    return args[0]


def make_streams():
    """
    Those of tasks, over descriptors that are pipes as theirs will be: each fork puts its own in their place before it runs anything. Until then what
    imported modules write goes nowhere, as nobody would read the pipe.
    """
    global STREAMS
    ends = os.pipe()
    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    # As the locale has it, which is the task's.
    errors = sys.stdout.errors
    STREAMS = stream(0, 'r', errors=errors), stream(1, 'w', errors=errors), stream(2, 'w', errors='backslashreplace', line_buffering=True)
    nothing = os.open('/dev/null', os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    os.close(nothing)


def stream(fd, mode, **more):
    return io.TextIOWrapper(open(fd, mode + 'b', closefd=False), encoding='utf-8', **more)


def rehearse():
    """What every script's start and end do. Leaves nothing that a script could find."""
    nothing = os.open('/dev/null', os.O_RDWR)
    given, told = stream(nothing, 'r'), stream(nothing, 'w')
    module = types.ModuleType('__main__')
    module.__builtins__ = __builtins__
    module.__dict__.update(given=given, told=told)
    exec(compile(REHEARSAL, 'rehearsal', 'exec', dont_inherit=True), module.__dict__)
    module.__dict__.clear()
    gc.collect()
    os.close(nothing)


# The interpreter makes code its own that has run some times.
REHEARSALS = 20
REHEARSAL = '''
import os, sys
class Some:
    def __init__(self, word): self.word = word
    def __str__(self): return f'{self.word:>10}{len(self.word)!r}'
def work(words):
    try:
        return sum(map(int, words)) / len(words)
    except (ValueError, ZeroDivisionError) as error:
        return {'error': str(error), 'words': [Some(one) for one in words]}
for line in given: pass
print(work('1 2 3'.split()), work([]), Some('x'), sorted([3, 1, 2]), file=told, flush=True)
'''


def hook(kind, value, trace):
    """As if nothing had been before the script."""
    while trace is not None and trace.tb_frame.f_globals is OWN:
        trace = trace.tb_next
    sys.__excepthook__(kind, value.with_traceback(trace), trace)


def run(script):
    """The script as the main module; its exit status."""
    module = types.ModuleType('__main__')
    module.__file__ = script
    module.__builtins__ = __builtins__
    kept, sys.modules['__main__'] = sys.modules['__main__'], module
    status = 0
    try:
        with open(script, 'rb') as file:
            code = file.read()
        exec(compile(code, script, 'exec', dont_inherit=True), module.__dict__)
    except SystemExit as wanted:
        status = status_of(wanted.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    # What the interpreter does at its end, without taking apart what all forks share: that would copy each page of it.
    try:
        if 'threading' in sys.modules:
            sys.modules['threading']._shutdown()
        atexit._run_exitfuncs()
        module.__dict__.clear()
        gc.collect()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            status = status or 120
    return status


def status_of(code):
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xff
    print(code, file=sys.stderr)
    return 1


OWN = globals()
LIBC = ctypes.CDLL(None, use_errno=True)
CALL = LIBC.syscall
SCRIPT = become(stay())
sys.excepthook = hook
os._exit(run(SCRIPT))
