//! The first process of a sandbox, from the clone to the exec of its command. It comes to life in its new namespaces as a copy of
//! the launcher, prepares what needs no root, waits for its order, isolates itself step by step, and becomes the command. It tells what
//! happened over its status socket: a frame with the terminal, one with a failure, or nothing but the end of the socket, which is
//! the exec.
//!
//! What must hold:
//! - The new root is entered before anything in it is looked at: no link of an image leads out.
//! - Every descriptor but the three standard ones is closed before it waits for its order: what waits here must not keep the streams of
//!   the launcher's other clients open. And again before the working directory is entered: `/proc/self/fd/N` as a
//!   working directory must lead nowhere. Where that directory is, is asked for again afterwards.
//! - What the image has at /proc, /dev and /sys is a folder: a link there may lead through /proc/self to where nothing is mounted, and
//!   then /dev/null, which masks what is secret, would be the image's.
//! - The filter of system calls comes last; then there is only exec.
//! - The agent of a sandbox that stays (aether.rs) is executed from the launcher's sealed copy, taken hold of before the root is
//!   entered: nothing of the launcher's memory is in it, nothing of the image is needed for it, and its channel is the status socket.

use crate::cgroup;
use crate::fill::{hide, make_devices, mount_one};
use crate::landlock;
use crate::order::{self, Cgroup, First, Order, Preparation};
use crate::sys::{self, c, Fd, RLimit, Result, SockFprog, WinSize};
use crate::userns;
use crate::wire::{self, Channel};

/// Where it failed: `stages` in launch-order.ts has the words.
#[derive(Clone, Copy)]
#[repr(u8)]
pub enum Stage {
    Order = 1,
    Cgroup = 2,
    Clone = 3,
    Stdio = 4,
    Root = 5,
    Mount = 6,
    Device = 7,
    Mask = 8,
    Network = 9,
    Terminal = 10,
    Limit = 11,
    Identity = 12,
    Seccomp = 13,
    Runtime = 14,
    AppArmor = 15,
    Task = 16,
    WorkingDir = 20,
    Exec = 21,
}

pub struct Failure {
    pub stage: Stage,
    pub errno: i32,
    pub what: Vec<u8>,
}


pub type Step = std::result::Result<(), Failure>;

pub trait At<T> {
    fn at(self, stage: Stage, what: &[u8]) -> std::result::Result<T, Failure>;
}
impl<T> At<T> for Result<T> {
    fn at(self, stage: Stage, what: &[u8]) -> std::result::Result<T, Failure> {
        self.map_err(|errno| Failure { stage, errno, what: what.to_vec() })
    }
}

/// Makes its control groups and namespaces, and a process in them that waits for its order; what it tells comes over the channel.
pub fn start(preparation: &Preparation, stdio: &[Fd]) -> std::result::Result<(i32, Channel), Failure> {
    let entries = cgroup::make(&preparation.cgroups)
        .map_err(|(errno, folder)| Failure { stage: Stage::Cgroup, errno, what: folder })?;
    // What is made with a namespace of message queues belongs to whoever makes it: its own root, later.
    let later = if preparation.is_mapped() { userns::NEW_IPC } else { 0 };
    let namespaces = preparation.namespaces & !later;
    let started = sys::socket_pair(sys::SOCK_STREAM).at(Stage::Stdio, b"status socket").and_then(|(status, child_status)| {
        match sys::clone_process(namespaces).at(Stage::Clone, b"its processes")? {
            0 => {
                // What is not the sandbox's is closed by it in time; nothing here is dropped twice.
                sys::close_fd(status.take());
                let numbers: Vec<i32> = stdio.iter().map(|fd| fd.0).collect();
                become_command(preparation, child_status, &entries, &numbers);
            }
            pid => {
                if preparation.is_mapped() {
                    if let Err(errno) = userns::write_maps(pid, &preparation.id_map) {
                        // Reaped by whoever reaps: it is known to nobody.
                        let _ = sys::send_signal(pid, sys::SIGKILL);
                        return Err(errno).at(Stage::Clone, b"its user namespace's ids");
                    }
                    userns::give_streams(stdio, &preparation.id_map);
                }
                Ok((pid, Channel::new(status, 1)))
            }
        }
    });
    if started.is_err() {
        drop(entries);
        cgroup::remove(&preparation.cgroups);
    }
    started
}

/// To the process that waits for it.
pub fn send_order(channel: &mut Channel, id: u32, order: &[u8], mapped: bool) -> Step {
    if mapped {
        channel.send_carrying(wire::LAUNCH, id, order, userns::root_of_order(order)?);
    } else {
        channel.send(wire::LAUNCH, id, order);
    }
    Ok(())
}

pub fn failure_payload(failure: &Failure) -> Vec<u8> {
    let mut payload = vec![failure.stage as u8];
    payload.extend_from_slice(&failure.errno.to_le_bytes());
    wire::put_bytes(&mut payload, &failure.what[..failure.what.len().min(4096)]);
    payload
}

/// Never returns. `stdio`: descriptors above 2, or none for those of this process.
fn become_command(preparation: &Preparation, status: Fd, entries: &[Fd], stdio: &[i32]) -> ! {
    let done = prepare(preparation, status.0, entries, stdio).and_then(|_| {
        let (order, root) = receive_order(status.0)?;
        isolate(&order, root, preparation, status.0)
    });
    if let Err(failure) = done {
        let mut frame = Vec::new();
        wire::put_frame(&mut frame, wire::FAILED, 0, &failure_payload(&failure));
        let _ = sys::send_with_fds(status.0, &frame, &[]);
    }
    unsafe { sys::_exit(127) }
}

fn prepare(preparation: &Preparation, status: i32, entries: &[Fd], stdio: &[i32]) -> Step {
    // Who launched it gone: so is the sandbox.
    let _ = sys::prctl1(sys::PR_SET_PDEATHSIG, sys::SIGKILL as u64);
    cgroup::enter(entries).at(Stage::Cgroup, b"its control groups")?;
    sys::new_session().at(Stage::Stdio, b"session")?;
    for (number, fd) in stdio.iter().enumerate() {
        sys::dup_to(*fd, number as i32).at(Stage::Stdio, b"standard streams")?;
    }
    close_all_but(&[status]);
    if preparation.namespaces & NEW_NETWORK != 0 {
        raise_loopback().at(Stage::Network, b"lo")?;
    }
    Ok(())
}

/// Waits for it; with it may come its root. The launcher gone instead: then there is nobody to tell.
fn receive_order(status: i32) -> std::result::Result<(Order, Option<Fd>), Failure> {
    let mut head = [0u8; wire::HEADER];
    let (n, mut fds) = sys::receive_with_fds(status, &mut head, 0).at(Stage::Order, b"order")?;
    if n == 0 {
        unsafe { sys::_exit(127) }
    }
    read_exact(status, &mut head[n..]).at(Stage::Order, b"order")?;
    let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
    if length > wire::MAX_PAYLOAD {
        return Err(sys::EINVAL).at(Stage::Order, b"order");
    }
    let mut payload = vec![0u8; length];
    read_exact(status, &mut payload).at(Stage::Order, b"order")?;
    match order::parse_order(&payload) {
        Some(order) => Ok((order, fds.pop())),
        None => Err(sys::EINVAL).at(Stage::Order, b"order"),
    }
}

fn read_exact(fd: i32, mut buffer: &mut [u8]) -> Result<()> {
    while !buffer.is_empty() {
        let n = sys::read_fd(fd, buffer)?;
        if n == 0 {
            unsafe { sys::_exit(127) }
        }
        buffer = &mut buffer[n..];
    }
    Ok(())
}

fn isolate(order: &Order, root: Option<Fd>, preparation: &Preparation, status: i32) -> Step {
    let mapped = preparation.is_mapped();
    sys::set_umask(0);
    let groups = match order.first {
        First::Task => group_folders(&preparation.cgroups)?,
        _ => Vec::new(),
    };
    let program = match order.first {
        First::Command => None,
        _ => Some(sys::open_at(b"/proc/self/exe", sys::O_RDONLY, 0).at(Stage::Exec, b"the agent")?),
    };
    let held = enter_root(order, root, mapped)?;
    if mapped {
        // From nobody to its own root; what is made from here on is that one's.
        sys::set_ids(0, 0, &[]).at(Stage::Identity, b"root of its user namespace")?;
        sys::unshare(userns::NEW_IPC as i32).at(Stage::Clone, b"of message queues")?;
    }
    for (i, mount) in order.mounts.iter().enumerate() {
        let made = held.mounts.get(i).and_then(|one| one.as_ref());
        mount_one(mount, made).at(Stage::Mount, &mount.target)?;
    }
    make_devices(order, &held.devices)?;
    sys::set_host_name(&order.hostname).at(Stage::Network, &order.hostname)?;
    if order.terminal {
        take_terminal(order, status)?;
    }
    hide(order)?;
    for (resource, soft, hard) in &order.limits {
        let limit = RLimit { soft: *soft, hard: *hard };
        sys::set_limit(*resource, &limit).at(Stage::Limit, resource.to_string().as_bytes())?;
    }
    sys::new_session_keyring();
    if !order.apparmor.is_empty() {
        take_profile(&order.apparmor).at(Stage::AppArmor, &order.apparmor)?;
    }
    if order.uid != 0 {
        give_streams(order);
    }
    let kept: Vec<i32> = program.iter().chain(&groups).map(|fd| fd.0).chain([status]).collect();
    close_all_but(&kept);
    enter_working_dir_and_user(order)?;
    sys::set_umask(order.umask);
    // Cleared by the change of user.
    let _ = sys::prctl1(sys::PR_SET_PDEATHSIG, sys::SIGKILL as u64);
    sys::default_signals();
    sys::unblock_all_signals();
    match &program {
        None => run(order),
        Some(fd) => run_agent(order, fd, status, &groups),
    }
}

const NEW_NETWORK: u64 = 0x40000000;
const NEW_MOUNTS: i32 = 0x20000;

/// What a sandbox with a user namespace cannot make once the host's root is left. Else empty.
struct Held {
    devices: Vec<Fd>,
    mounts: Vec<Option<Fd>>,
}

fn enter_root(order: &Order, root: Option<Fd>, mapped: bool) -> std::result::Result<Held, Failure> {
    sys::unshare(NEW_MOUNTS).at(Stage::Clone, b"of mounts")?;
    sys::mount_at(b"", b"/", b"", sys::MS_REC | sys::MS_PRIVATE, b"").at(Stage::Root, b"/")?;
    // Binds come from the host: taken hold of before it is left, put in place when links can lead nowhere else.
    let mut held = Vec::new();
    for bind in &order.binds {
        held.push(clone_tree(&bind.source).at(Stage::Mount, &bind.source)?);
    }
    let kept = match mapped {
        false => Held { devices: Vec::new(), mounts: Vec::new() },
        true => Held {
            devices: userns::hold_devices(&order.devices)
                .map_err(|(errno, what)| Failure { stage: Stage::Device, errno, what })?,
            mounts: userns::hold_mounts(&order.mounts)
                .map_err(|(errno, what)| Failure { stage: Stage::Mount, errno, what })?,
        },
    };
    match &root {
        None => sys::change_dir(&order.root).at(Stage::Root, &order.root)?,
        Some(tree) => {
            // Over the host's root; that it is in a tree of this namespace is all that counts.
            attach_tree(tree.0, b"/").at(Stage::Root, &order.root)?;
            sys::change_dir_fd(tree.0).at(Stage::Root, &order.root)?;
        }
    }
    sys::pivot_root(b".", b".").at(Stage::Root, &order.root)?;
    // The old root lies on top of the new one now.
    sys::detach_mount(b".").at(Stage::Root, b"the old root")?;
    sys::change_dir(b"/").at(Stage::Root, b"/")?;
    for (bind, tree) in order.binds.iter().zip(&held) {
        attach_tree(tree.0, &bind.target).at(Stage::Mount, &bind.target)?;
        let flags = sys::MS_REMOUNT | sys::MS_BIND | bind.flags;
        sys::mount_at(b"", &bind.target, b"", flags, b"").at(Stage::Mount, &bind.target)?;
    }
    Ok(kept)
}

const OPEN_TREE: i64 = 428;
const MOVE_MOUNT: i64 = 429;
const AT_FDCWD: i32 = -100;

pub fn clone_tree(path: &[u8]) -> Result<Fd> {
    const OPEN_TREE_CLONE: u32 = 1;
    const AT_RECURSIVE: u32 = 0x8000;
    let path = c(path);
    let flags = OPEN_TREE_CLONE | AT_RECURSIVE | sys::O_CLOEXEC as u32;
    let fd = unsafe { sys::syscall(OPEN_TREE, AT_FDCWD, path.as_ptr(), flags) };
    if fd < 0 {
        Err(sys::errno())
    } else {
        Ok(Fd(fd as i32))
    }
}

pub fn attach_tree(tree: i32, target: &[u8]) -> Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;
    const MOVE_MOUNT_T_SYMLINKS: u32 = 0x10;
    let (target, empty) = (c(target), c(b""));
    let flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS;
    let done = unsafe { sys::syscall(MOVE_MOUNT, tree, empty.as_ptr(), AT_FDCWD, target.as_ptr(), flags) };
    if done < 0 {
        Err(sys::errno())
    } else {
        Ok(())
    }
}

pub fn raise_loopback() -> Result<()> {
    let socket = sys::new_socket(sys::AF_INET, sys::SOCK_DGRAM)?;
    // struct ifreq: the name, then the flags.
    let mut request = [0u64; 5];
    let raw = request.as_mut_ptr() as *mut u8;
    unsafe {
        *raw = b'l';
        *raw.add(1) = b'o';
    }
    sys::ioctl_ptr(socket.0, sys::SIOCGIFFLAGS, raw)?;
    const IFF_UP: u8 = 1;
    unsafe { *raw.add(16) |= IFF_UP };
    sys::ioctl_ptr(socket.0, sys::SIOCSIFFLAGS, raw).map(|_| ())
}

/// A terminal of the sandbox's own devpts; its other end goes to the launcher.
fn take_terminal(order: &Order, status: i32) -> Step {
    let at = |step: Result<()>| step.at(Stage::Terminal, b"/dev/ptmx");
    let master = sys::open_at(b"/dev/ptmx", sys::O_RDWR | sys::O_NOCTTY, 0).at(Stage::Terminal, b"/dev/ptmx")?;
    let mut unlocked = 0i32;
    at(sys::ioctl_ptr(master.0, sys::TIOCSPTLCK, &mut unlocked).map(|_| ()))?;
    let mut number = 0u32;
    at(sys::ioctl_ptr(master.0, sys::TIOCGPTN, &mut number).map(|_| ()))?;
    let path = [b"/dev/pts/", number.to_string().as_bytes()].concat();
    let slave = sys::open_at(&path, sys::O_RDWR | sys::O_NOCTTY, 0).at(Stage::Terminal, &path)?;
    if order.rows > 0 && order.columns > 0 {
        let mut size = WinSize { rows: order.rows, columns: order.columns, x: 0, y: 0 };
        at(sys::ioctl_ptr(master.0, sys::TIOCSWINSZ, &mut size).map(|_| ()))?;
    }
    at(sys::ioctl_int(slave.0, sys::TIOCSCTTY, 0).map(|_| ()))?;
    let (_, _, group) = sys::stat_fd(slave.0).at(Stage::Terminal, &path)?;
    at(sys::change_owner(slave.0, order.uid, group))?;
    // Programs that write to the console write to this terminal.
    let console = sys::open_at(b"/dev/console", sys::O_WRONLY | sys::O_CREAT | sys::O_NOFOLLOW, 0o600);
    drop(console.at(Stage::Terminal, b"/dev/console")?);
    sys::mount_at(&path, b"/dev/console", b"", sys::MS_BIND, b"").at(Stage::Terminal, b"/dev/console")?;
    for number in 0..3 {
        at(sys::dup_to(slave.0, number))?;
    }
    let mut frame = Vec::new();
    wire::put_frame(&mut frame, wire::TERMINAL, 0, &[]);
    sys::send_with_fds(status, &frame, &[master.0]).at(Stage::Terminal, b"launcher").map(|_| ())
}

/// With the next exec. The path is that of Linux 5.8; before it there was one for all security modules.
fn take_profile(name: &[u8]) -> Result<()> {
    let wanted = [b"exec ", name].concat();
    match sys::write_file(b"/proc/self/attr/apparmor/exec", &wanted) {
        Err(sys::ENOENT) => sys::write_file(b"/proc/self/attr/exec", &wanted),
        done => done,
    }
}

/// Pipes and sockets without a name alone: a file, a named pipe or a terminal of the host belongs to whoever made it, and another
/// owner would outlast us.
fn give_streams(order: &Order) {
    for fd in 0..3 {
        if matches!(sys::file_system_of(fd), Ok(sys::PIPEFS | sys::SOCKFS)) {
            let _ = sys::change_owner(fd, order.uid, order.gid);
        }
    }
}

fn close_all_but(kept: &[i32]) {
    let mut sorted = kept.to_vec();
    sorted.sort_unstable();
    let mut from = 3u32;
    for fd in sorted {
        sys::close_range(from, fd as u32 - 1, false);
        from = fd as u32 + 1;
    }
    sys::close_range(from, u32::MAX, false);
}

fn enter_working_dir_and_user(order: &Order) -> Step {
    // As root first: the folder may be one that the user may be in but not get to.
    let as_root = sys::change_dir(&order.cwd);
    let _ = sys::clear_ambient();
    for capability in 0..64 {
        if order.bounding & (1 << capability) != 0 {
            continue;
        }
        match sys::prctl1(sys::PR_CAPBSET_DROP, capability) {
            Ok(_) => {}
            // Beyond the last one that this kernel knows.
            Err(sys::EINVAL) => break,
            Err(errno) => return Err(errno).at(Stage::Identity, b"bounding set"),
        }
    }
    sys::prctl1(sys::PR_SET_KEEPCAPS, 1).at(Stage::Identity, b"capabilities")?;
    sys::set_ids(order.uid, order.gid, &order.groups).at(Stage::Identity, b"user and groups")?;
    sys::prctl1(sys::PR_SET_KEEPCAPS, 0).at(Stage::Identity, b"capabilities")?;
    sys::set_capabilities(order.capabilities, order.capabilities, 0).at(Stage::Identity, b"capabilities")?;
    sys::prctl1(sys::PR_SET_NO_NEW_PRIVS, 1).at(Stage::Identity, b"no_new_privs")?;
    if as_root.is_err() {
        sys::change_dir(&order.cwd).at(Stage::WorkingDir, &order.cwd)?;
    }
    match sys::working_dir() {
        Ok(path) if path.starts_with(b"/") => Ok(()),
        _ => Err(sys::ENOENT).at(Stage::WorkingDir, &order.cwd),
    }
}

fn run(order: &Order) -> Step {
    let args: Vec<_> = order.args.iter().map(|arg| c(arg)).collect();
    let env: Vec<_> = order.env.iter().map(|entry| c(entry)).collect();
    let candidates = candidates(&order.args[0], &order.env);
    install_filter(order)?;
    // As execvp: what may not be executed is passed over, and told of when nothing else is found.
    let mut refused = sys::ENOENT;
    for path in &candidates {
        match sys::exec(path, &args, &env) {
            sys::ENOENT | sys::ENOTDIR => {}
            sys::EACCES => refused = sys::EACCES,
            errno => {
                refused = errno;
                break;
            }
        }
    }
    Err(refused).at(Stage::Exec, &order.args[0])
}

fn install_filter(order: &Order) -> Step {
    landlock::restrict();
    if order.seccomp.is_empty() {
        return Ok(());
    }
    let program = SockFprog { len: (order.seccomp.len() / 8) as u16, filter: order.seccomp.as_ptr() };
    sys::set_seccomp(&program).at(Stage::Seccomp, b"filter").map(|_| ())
}

/// Taken hold of while the host's hierarchies can be seen.
fn group_folders(groups: &[Cgroup]) -> std::result::Result<Vec<Fd>, Failure> {
    let open = |group: &Cgroup| {
        sys::open_at(&group.folder, sys::O_RDONLY | sys::O_DIRECTORY, 0).at(Stage::Cgroup, &group.folder)
    };
    groups.iter().map(open).collect()
}

fn run_agent(order: &Order, program: &Fd, status: i32, groups: &[Fd]) -> Step {
    let mut args = vec![c(b"dsec-agent")];
    if let First::Agent(lifetime) = order.first {
        args.extend([&b"agent"[..], status.to_string().as_bytes(), lifetime.to_string().as_bytes()].map(c));
        sys::keep_on_exec(status);
    } else {
        // The status socket ends with the exec, which is how the launcher knows that it runs.
        let numbers: Vec<String> = groups.iter().map(|fd| fd.0.to_string()).collect();
        args.extend([&b"task"[..], numbers.join(",").as_bytes()].map(c));
        for fd in groups {
            sys::keep_on_exec(fd.0);
        }
    }
    install_filter(order)?;
    Err(sys::exec_fd(program.0, &args, &[])).at(Stage::Exec, b"the agent")
}

/// Where execvp would look, in this order.
pub fn candidates(name: &[u8], env: &[Vec<u8>]) -> Vec<Vec<u8>> {
    if name.contains(&b'/') {
        return vec![name.to_vec()];
    }
    let path = env.iter().rev().find(|entry| entry.starts_with(b"PATH=")).map_or(&b""[..], |entry| &entry[5..]);
    path.split(|byte| *byte == b':')
        .map(|folder| if folder.is_empty() { [b"./", name].concat() } else { [folder, b"/", name].concat() })
        .collect()
}
