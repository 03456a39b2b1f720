/** Two programs for the tests of FnCall: one leaves whatever a program can leave behind, the other tells all that it finds. */

/** What could not even be tried is told too: a test of nothing proves nothing. */
export const PLANT = String.raw`
import ctypes, os, resource, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
done, refused = [], []
def attempt(name, work):
    try:
        work()
        done.append(name)
    except OSError as error:
        refused.append(name)
def write(path, text='planted'):
    def work():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as file:
            file.write(text)
    attempt(path, work)
home = os.environ['HOME']
for folder in ['/tmp', '/var/tmp', '/dev/shm', '/work', home]:
    write(folder + '/planted')
    write(folder + '/.hidden/planted')
for path in ['/etc/cron.d/planted', '/var/spool/cron/planted', '/usr/bin/planted', '/etc/profile', '/root/.bashrc', '/planted', '/run/planted',
             os.path.dirname(os.__file__) + '/planted.pth', os.path.dirname(os.__file__) + '/__pycache__/json.pyc', '/home/planted', '/dev/planted',
             '/proc/sys/kernel/core_pattern', '/sys/kernel/planted']:
    write(path)
write(home + '/.bashrc', 'echo poisoned')
write(home + '/.profile', 'echo poisoned')
write(home + '/.cache/pip/planted')
write(home + '/.local/lib/python%d.%d/site-packages/usercustomize.py' % sys.version_info[:2], 'print("poisoned")')
write('/work/json.py', 'print("poisoned")')
def call(name, *args):
    def work():
        if getattr(libc, name)(*args) < 0:
            raise OSError(ctypes.get_errno(), name)
    attempt(name, work)
call('shmget', 4711, 4096, 0o1666)
call('semget', 4711, 1, 0o1666)
call('msgget', 4711, 0o1666)
def check_mq():
    if libc.mq_open(b'/planted', os.O_CREAT | os.O_RDWR, 0o666, None) < 0:
        raise OSError(ctypes.get_errno(), 'mq_open')
attempt('mq_open', check_mq)
def add_key():
    if libc.syscall(217 if os.uname().machine == 'aarch64' else 248, b'user', b'planted', b'x', 1, -4) < 0:
        raise OSError(ctypes.get_errno(), 'add_key')
attempt('add_key', add_key)
attempt('prlimit of the first process', lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)))
attempt('nice', lambda: os.nice(7))
attempt('affinity', lambda: os.sched_setaffinity(0, {0}))
attempt('limit', lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)))
attempt('signal to the first process', lambda: os.kill(1, signal.SIGKILL))
def call_mount():
    if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) < 0:
        raise OSError(ctypes.get_errno(), 'mount')
attempt('mount', call_mount)
attempt('host name', lambda: socket.sethostname('planted'))
signal.setitimer(signal.ITIMER_REAL, 3600)
def daemon(body):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 32):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except OSError:
                    pass
            body()
            while True:
                signal.pause()
        os._exit(0)
ready, told = os.pipe()
def serve():
    first = socket.socket(socket.AF_UNIX)
    first.bind('\0planted')
    first.listen()
    second = socket.socket()
    second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    second.bind(('127.0.0.1', 5555))
    second.listen()
    globals()['kept'] = (first, second)
    os.write(told, b'x')
daemon(serve)
os.read(ready, 1)
daemon(lambda: None)
with socket.create_connection(('127.0.0.1', 5555)):
    pass
os.umask(0o777)
print('\n'.join('done ' + one for one in done))
print('\n'.join('refused ' + one for one in refused))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
`;

export const LOOK = String.raw`
import ctypes, os, resource, socket, sys, json, time
libc = ctypes.CDLL(None, use_errno=True)
out = []
for folder in ['/tmp', '/var/tmp', '/dev/shm', '/run', '/work', os.environ['HOME'], '/dev', '/dev/mqueue', '/etc', '/etc/cron.d', '/', '/home', '/root', '/usr/bin',
               os.path.dirname(os.__file__)]:
    try:
        out.append((folder, sorted(os.listdir(folder)), oct(os.stat(folder).st_mode)))
    except OSError as error:
        out.append((folder, error.errno))
for name in ['shm', 'sem', 'msg']:
    out.append((name, open('/proc/sysvipc/' + name).read().splitlines()[1:]))
for name in ['shmget', 'semget', 'msgget']:
    args = (4711, 0) if name == 'msgget' else (4711, 0, 0)
    out.append((name, getattr(libc, name)(*args)))
out.append(('processes', sum(1 for one in os.listdir('/proc') if one.isdigit())))
for name in ['unix', 'tcp', 'tcp6', 'udp']:
    out.append((name, len(open('/proc/net/' + name).read().splitlines())))
one = socket.socket(socket.AF_UNIX)
out.append(('abstract', one.connect_ex('\0planted')))
two = socket.socket()
two.bind(('127.0.0.1', 5555))
three = socket.socket()
out.append(('loopback', three.connect_ex(('127.0.0.1', 5556))))
out.append(('limits', [resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK)]))
out.append(('nice', os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))))
out.append(('umask', os.umask(0)))
out.append(('environment', sorted(os.environ.items())))
out.append(('host name', len(socket.gethostname())))
out.append(('mounts', [line.split(' - ')[0].split(' ')[3:6] for line in open('/proc/self/mountinfo').read().splitlines()]))
out.append(('json', json.__file__))
status = open('/proc/self/status').read()
out.append(('status', [line for line in status.splitlines() if line.startswith(('Cap', 'NoNew', 'Seccomp:', 'Groups', 'Uid', 'SigIgn', 'SigBlk', 'SigPnd'))]))
print('\n'.join(map(str, out)))
`;

/** Leaves its mark wherever it can, and says which others it sees. */
export const MARK = `
import ctypes, os, sys
mark = sys.argv[1]
libc = ctypes.CDLL(None)
seen = []
for folder in ['/tmp', '/var/tmp', '/dev/shm', '/work', os.environ['HOME']]:
    seen += [name for name in os.listdir(folder) if name.startswith('mark-')]
    open(folder + '/mark-' + mark, 'w').close()
if len(open('/proc/sysvipc/shm').read().splitlines()) > 1:
    seen.append('shm')
libc.shmget(int(mark) + 1, 4096, 0o1666)
seen += [open('/proc/%s/cmdline' % pid).read() for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, os.getpid())]
if os.fork() == 0:
    os.setsid()
    while True:
        os.read(0, 1) or __import__('time').sleep(1000)
print(mark, seen)
`;
