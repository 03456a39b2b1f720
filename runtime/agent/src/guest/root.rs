//! The root of a guest's sandbox: modules, the layers' devices, OverlayFS over them in the order that containers have, and the process that becomes
//! aether in it. What is the guest's own (this program, its port, the layers) stays in the first root, which the sandbox does not see.

use crate::container::{At, Failure, Stage, Step};
use crate::guest::order::{Layer, Order};
use crate::sys::{self, c, Fd, Result};

pub const UPPER: &[u8] = b"/upper";
const ROOT: &[u8] = b"/sandbox";
/// Of all commands; what the sandbox sees as the top of its control groups.
pub const COMMANDS: &[u8] = b"/sys/fs/cgroup/commands";
const AGENT_GROUP: &[u8] = b"/sys/fs/cgroup/agent";

const NOSUID: u64 = 2;
const NODEV: u64 = 4;
const NOEXEC: u64 = 8;
const RELATIME: u64 = 1 << 21;
const MS_MOVE: u64 = 8192;

type Outcome<T> = std::result::Result<T, Failure>;

/// What the first process needs for itself.
pub fn begin() -> Step {
    for folder in [&b"/proc"[..], b"/sys", b"/dev", b"/layers", UPPER, ROOT, b"/shown"] {
        ensure_dir(folder).at(Stage::Mount, folder)?;
    }
    sys::mount_at(b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, b"").at(Stage::Mount, b"/proc")?;
    sys::mount_at(b"sysfs", b"/sys", b"sysfs", NOSUID | NODEV | NOEXEC, b"").at(Stage::Mount, b"/sys")?;
    sys::mount_at(b"devtmpfs", b"/dev", b"devtmpfs", NOSUID, b"mode=0755").at(Stage::Mount, b"/dev")
}

fn ensure_dir(path: &[u8]) -> Result<()> {
    match sys::make_dir(path, 0o755) {
        Err(sys::EEXIST) => Ok(()),
        done => done,
    }
}

/// With what it needs, in order, as `modules/order` of the archive or the host has it.
pub fn load_module(name: &[u8]) -> Step {
    let path = [b"/modules/", name].concat();
    let file = sys::open_at(&path, sys::O_RDONLY, 0).at(Stage::Runtime, &path)?;
    match sys::load_module(file.0) {
        // It is there already, or it is for another processor.
        Err(sys::EEXIST) | Err(sys::ENODEV) => Ok(()),
        done => done.at(Stage::Runtime, &path),
    }
}

/// Makes the root, its control groups and its network. What it had to make in the root for its mounts.
pub fn build(order: &Order) -> Outcome<Vec<Vec<u8>>> {
    for module in &order.modules {
        load_module(module)?;
    }
    for (path, value) in &order.writes {
        // Of a kernel that lacks it: it is done without.
        let _ = sys::write_file(path, value);
    }
    sys::set_clock(order.clock_ns).at(Stage::Runtime, b"clock")?;
    let _ = sys::add_entropy(&order.entropy);
    sys::set_host_name(&order.hostname).at(Stage::Network, &order.hostname)?;
    control_groups(order)?;
    crate::guest::network::apply(&order.messages).map_err(|(errno, at)| Failure {
        stage: Stage::Network,
        errno,
        what: format!("message {}", at).into_bytes(),
    })?;
    let mut lowers = Vec::new();
    for (number, layer) in order.layers.iter().enumerate() {
        lowers.push(mount_layer(number, layer)?);
    }
    let upper = device(&order.upper)?;
    sys::mount_at(&upper, UPPER, b"ext4", RELATIME, b"").at(Stage::Mount, &upper)?;
    for name in [&b"upper"[..], b"work"] {
        let folder = [UPPER, b"/", name].concat();
        ensure_dir(&folder).at(Stage::Mount, &folder)?;
    }
    overlay(&lowers)?;
    let mut made = Vec::new();
    for folder in [&b"proc"[..], b"sys", b"dev"] {
        point(folder, true, &mut made)?;
    }
    for disk in &order.disks {
        point(&disk.target, true, &mut made)?;
        let source = device(&disk.device)?;
        let target = [ROOT, b"/", &disk.target].concat();
        sys::mount_at(&source, &target, &disk.kind, RELATIME, &disk.data).at(Stage::Mount, &target)?;
    }
    for (number, (path, content)) in order.files.iter().enumerate() {
        point(path, false, &mut made)?;
        let source = [b"/shown/", number.to_string().as_bytes()].concat();
        let file = sys::open_at(&source, sys::O_WRONLY | sys::O_CREAT, 0o644).at(Stage::Mount, &source)?;
        sys::write_all(file.0, content).at(Stage::Mount, &source)?;
        let target = [ROOT, b"/", path].concat();
        sys::mount_at(&source, &target, b"", sys::MS_BIND, b"").at(Stage::Mount, &target)?;
    }
    Ok(made)
}

fn control_groups(order: &Order) -> Step {
    let root = b"/sys/fs/cgroup";
    sys::mount_at(b"cgroup2", root, b"cgroup2", NOSUID | NODEV | NOEXEC, b"").at(Stage::Cgroup, root)?;
    for controller in [&b"+cpu"[..], b"+cpuset", b"+io", b"+memory", b"+pids"] {
        let _ = sys::write_file(b"/sys/fs/cgroup/cgroup.subtree_control", controller);
    }
    for group in [COMMANDS, AGENT_GROUP] {
        ensure_dir(group).at(Stage::Cgroup, group)?;
    }
    for (file, value) in &order.limits {
        let path = [COMMANDS, b"/", file].concat();
        sys::write_file(&path, value).at(Stage::Cgroup, &path)?;
    }
    Ok(())
}

fn mount_layer(number: usize, layer: &Layer) -> Outcome<Vec<u8>> {
    let target = [b"/layers/", number.to_string().as_bytes()].concat();
    ensure_dir(&target).at(Stage::Mount, &target)?;
    let mut options: Vec<Vec<u8>> = Vec::new();
    if layer.dax {
        options.push(b"dax=always".to_vec());
    }
    for name in &layer.devices[1..] {
        options.push([b"device=", &device(name)?[..]].concat());
    }
    let source = device(&layer.devices[0])?;
    sys::mount_at(&source, &target, b"erofs", sys::MS_RDONLY, &options.join(&b','))
        .at(Stage::Mount, &[&layer.devices[0][..], b" as ", &source].concat())?;
    Ok(target)
}

/// The names are short, so that some hundred layers fit into the page that mount takes.
fn overlay(lowers: &[Vec<u8>]) -> Step {
    sys::change_dir(b"/layers").at(Stage::Mount, b"/layers")?;
    let names: Vec<Vec<u8>> = (0..lowers.len()).rev().map(|number| number.to_string().into_bytes()).collect();
    let data = [b"lowerdir=", &names.join(&b':')[..], b",upperdir=/upper/upper,workdir=/upper/work"].concat();
    sys::mount_at(b"overlay", ROOT, b"overlay", 0, &data).at(Stage::Mount, b"overlay")?;
    sys::change_dir(b"/").at(Stage::Mount, b"/")
}

/// A place to mount on. No link of the image leads out of the root: what is not what it should be is refused.
fn point(path: &[u8], is_folder: bool, made: &mut Vec<Vec<u8>>) -> Step {
    let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).collect();
    let mut at = ROOT.to_vec();
    let mut inside = Vec::new();
    for (depth, part) in parts.iter().enumerate() {
        at = [&at[..], b"/", part].concat();
        inside = [&inside[..], b"/", part].concat();
        let wants_folder = is_folder || depth + 1 < parts.len();
        match sys::mode_of(&at, false) {
            Ok(mode) if (mode & sys::S_IFMT == sys::S_IFDIR) == wants_folder && mode & sys::S_IFMT != S_IFLNK => {}
            Ok(_) => return Err(sys::ENOTDIR).at(Stage::Mount, &inside),
            Err(sys::ENOENT) => {
                if wants_folder {
                    sys::make_dir(&at, 0o755).at(Stage::Mount, &inside)?;
                } else {
                    sys::open_at(&at, sys::O_WRONLY | sys::O_CREAT, 0o644).at(Stage::Mount, &inside)?;
                }
                made.push(inside.clone());
            }
            Err(errno) => return Err(errno).at(Stage::Mount, &inside),
        }
    }
    Ok(())
}

const S_IFLNK: u32 = 0o120000;
const DEVICE_MS: u64 = 10_000;

/// `/dev/NAME` of a drive by its serial number, or by its name where the machine gives none, as memory. It may come a moment after its driver.
fn device(name: &[u8]) -> Outcome<Vec<u8>> {
    let deadline = sys::now_ms() + DEVICE_MS;
    loop {
        let found = if name.starts_with(b"pmem") || name.starts_with(b"vd") {
            Some([b"/dev/", name].concat())
        } else {
            sys::names_in("/sys/block").into_iter().find_map(|block| {
                let serial = sys::read_file(&[b"/sys/block/", &block[..], b"/serial"].concat(), 64).ok()?;
                let serial: Vec<u8> = serial.into_iter().filter(|byte| !byte.is_ascii_whitespace()).collect();
                if serial == name {
                    Some([b"/dev/", &block[..]].concat())
                } else {
                    None
                }
            })
        };
        if let Some(path) = found.filter(|path| sys::mode_of(path, false).is_ok()) {
            return Ok(path);
        }
        if sys::now_ms() > deadline {
            return Err(sys::ENOENT).at(Stage::Device, name);
        }
        sys::poll_fds(&mut [], 2);
    }
}

/// In its own process: becomes the agent, the first process of what the sandbox sees. Comes back only when that failed.
pub fn become_agent(channel: i32, lifetime_ms: u64) -> Step {
    const NEW_CGROUP: i32 = 0x02000000;
    let program = sys::open_at(b"/init", sys::O_RDONLY, 0).at(Stage::Exec, b"/init")?;
    // Seen from inside, the commands' group is the top; the agent is outside of it, and of its limits.
    enter(COMMANDS).at(Stage::Cgroup, COMMANDS)?;
    sys::unshare(NEW_CGROUP).at(Stage::Clone, b"of control groups")?;
    enter(AGENT_GROUP).at(Stage::Cgroup, AGENT_GROUP)?;
    sys::mount_at(b"", b"/", b"", sys::MS_REC | sys::MS_PRIVATE, b"").at(Stage::Root, b"/")?;
    let mounts: [(&[u8], &[u8], &[u8], u64, &[u8]); 7] = [
        (b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, b""),
        (b"sysfs", b"/sys", b"sysfs", NOSUID | NODEV | NOEXEC, b""),
        (b"cgroup2", b"/sys/fs/cgroup", b"cgroup2", NOSUID | NODEV | NOEXEC, b""),
        (b"devtmpfs", b"/dev", b"devtmpfs", NOSUID, b"mode=0755"),
        (b"devpts", b"/dev/pts", b"devpts", NOSUID | NOEXEC, b"newinstance,ptmxmode=0666,mode=0620,gid=5"),
        (b"shm", b"/dev/shm", b"tmpfs", NOSUID | NODEV, b"mode=1777"),
        (b"mqueue", b"/dev/mqueue", b"mqueue", NOSUID | NODEV | NOEXEC, b""),
    ];
    for (source, place, kind, flags, data) in mounts {
        let target = [ROOT, place].concat();
        if place.starts_with(b"/dev/") {
            let _ = ensure_dir(&target);
        }
        sys::mount_at(source, &target, kind, flags, data).at(Stage::Mount, place)?;
    }
    let links: [(&[u8], &[u8]); 4] = [
        (b"/proc/self/fd", b"/dev/fd"),
        (b"/proc/self/fd/0", b"/dev/stdin"),
        (b"/proc/self/fd/1", b"/dev/stdout"),
        (b"/proc/self/fd/2", b"/dev/stderr"),
    ];
    for (target, path) in links {
        let _ = sys::make_symlink(target, &[ROOT, path].concat());
    }
    let ptmx = [ROOT, b"/dev/ptmx"].concat();
    sys::mount_at(&[ROOT, b"/dev/pts/ptmx"].concat(), &ptmx, b"", sys::MS_BIND, b"").at(Stage::Mount, b"/dev/ptmx")?;
    sys::change_dir(ROOT).at(Stage::Root, ROOT)?;
    sys::mount_at(b".", b"/", b"", MS_MOVE, b"").at(Stage::Root, ROOT)?;
    sys::change_root(b".").at(Stage::Root, ROOT)?;
    sys::change_dir(b"/").at(Stage::Root, ROOT)?;
    sys::keep_on_exec(channel);
    let args =
        [c(b"dsec-agent"), c(b"agent"), c(channel.to_string().as_bytes()), c(lifetime_ms.to_string().as_bytes())];
    Err(sys::exec_fd(program.0, &args, &[])).at(Stage::Exec, b"the agent")
}

fn enter(group: &[u8]) -> Result<()> {
    let entry: Fd = sys::open_at(&[group, b"/cgroup.procs"].concat(), sys::O_WRONLY, 0)?;
    sys::write_fd(entry.0, b"0").map(|_| ())
}
