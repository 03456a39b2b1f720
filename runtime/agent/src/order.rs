//! What a sandbox shall be, as Node orders it: runtime/backend/launch-order.ts writes what is read here, field by field. All policy
//! (which paths are masked, which capabilities stay) is there; here is only how it is done.
//!
//! It comes in two parts. What a preparation makes (control groups, namespaces, a process that waits in them) takes the kernel its time
//! and needs no root yet, so it goes on while Node mounts one; the order proper says the rest.

use crate::wire::{Reader, VERSION};

pub struct Preparation {
    pub stdio: Stdio,
    /// CLONE_NEW*, without that of mounts: the root is mounted meanwhile.
    pub namespaces: u64,
    pub cgroups: Vec<Cgroup>,
    /// Of users and groups, in its user namespace. Empty: it has none, and its root is the machine's.
    pub id_map: Vec<IdExtent>,
}

impl Preparation {
    pub fn is_mapped(&self) -> bool {
        !self.id_map.is_empty()
    }
}

pub struct IdExtent {
    pub inside: u32,
    pub outside: u32,
    pub count: u32,
}

pub struct Order {
    pub terminal: bool,
    pub rows: u16,
    pub columns: u16,
    /// A mount point of the host.
    pub root: Vec<u8>,
    pub hostname: Vec<u8>,
    pub binds: Vec<Bind>,
    pub mounts: Vec<Mount>,
    pub devices: Vec<Device>,
    /// Path, then what it points to.
    pub links: Vec<(Vec<u8>, Vec<u8>)>,
    pub masked: Vec<Vec<u8>>,
    pub read_only: Vec<Vec<u8>>,
    /// Resource, soft, hard.
    pub limits: Vec<(u32, u64, u64)>,
    pub bounding: u64,
    pub capabilities: u64,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub umask: u32,
    pub cwd: Vec<u8>,
    pub args: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    /// struct sock_filter, one after the other.
    pub seccomp: Vec<u8>,
    pub first: First,
    /// AppArmor's, taken on by the exec. Empty: none.
    pub apparmor: Vec<u8>,
}

/// What the first process becomes.
pub enum First {
    Command,
    /// The agent, with its channel, which ends the sandbox after so many milliseconds (0: never).
    Agent(u64),
    /// What takes tasks (task.rs), with the folders of its control groups.
    Task,
}

pub enum Stdio {
    /// Those of this process.
    Own,
    /// Those that a client has sent.
    Client(u32),
}

pub struct Mount {
    pub target: Vec<u8>,
    pub kind: Vec<u8>,
    pub source: Vec<u8>,
    pub flags: u64,
    pub data: Vec<u8>,
}

/// A file or folder of the host, read-only inside.
pub struct Bind {
    pub source: Vec<u8>,
    pub target: Vec<u8>,
    pub flags: u64,
}

pub struct Device {
    pub path: Vec<u8>,
    pub mode: u32,
    pub major: u32,
    pub minor: u32,
}

pub struct Cgroup {
    /// The group itself; the folder above it is made too.
    pub folder: Vec<u8>,
    /// A v1 cpuset group has no processors and no memory until it is given some.
    pub is_cpuset: bool,
    /// One for all sandboxes: it stays when this one has ended.
    pub is_shared: bool,
    pub writes: Vec<(Vec<u8>, Vec<u8>)>,
    /// Of a v2 group: struct bpf_insn, for BPF_CGROUP_DEVICE. Empty: none.
    pub device_program: Vec<u8>,
    /// The group below it that is entered instead. Empty: itself.
    pub leaf: Vec<u8>,
}

/// None when it does not parse to its very end.
pub fn parse_preparation(payload: &[u8]) -> Option<Preparation> {
    let mut r = Reader::new(payload);
    if r.u32()? != VERSION {
        return None;
    }
    let stdio = match (r.u8()?, r.u32()?) {
        (0, _) => Stdio::Own,
        (1, client) => Stdio::Client(client),
        _ => return None,
    };
    let preparation = Preparation {
        stdio,
        namespaces: r.u64()?,
        cgroups: r.list(|r| {
            let folder = r.text()?;
            let kind = r.u8()?;
            Some(Cgroup {
                folder,
                is_cpuset: kind & 1 != 0,
                is_shared: kind & 2 != 0,
                writes: r.list(|r| Some((r.text()?, r.bytes()?)))?,
                device_program: r.bytes()?,
                leaf: r.text()?,
            })
        })?,
        id_map: r.list(|r| Some(IdExtent { inside: r.u32()?, outside: r.u32()?, count: r.u32()? }))?,
    };
    let whole = r.is_at_end()
        && preparation.is_mapped() == (preparation.namespaces & crate::userns::NEW_USER != 0)
        && preparation.cgroups.iter().all(|group| group.device_program.len() % 8 == 0);
    if whole {
        Some(preparation)
    } else {
        None
    }
}

/// The same.
pub fn parse_order(payload: &[u8]) -> Option<Order> {
    let mut r = Reader::new(payload);
    let order = Order {
        terminal: r.u8()? != 0,
        rows: r.u16()?,
        columns: r.u16()?,
        root: r.text()?,
        hostname: r.text()?,
        binds: r.list(|r| Some(Bind { source: r.text()?, target: r.text()?, flags: r.u64()? }))?,
        mounts: r.list(|r| {
            Some(Mount { target: r.text()?, kind: r.text()?, source: r.text()?, flags: r.u64()?, data: r.text()? })
        })?,
        devices: r.list(|r| Some(Device { path: r.text()?, mode: r.u32()?, major: r.u32()?, minor: r.u32()? }))?,
        links: r.list(|r| Some((r.text()?, r.text()?)))?,
        masked: r.list(|r| r.text())?,
        read_only: r.list(|r| r.text())?,
        limits: r.list(|r| Some((r.u32()?, r.u64()?, r.u64()?)))?,
        bounding: r.u64()?,
        capabilities: r.u64()?,
        uid: r.u32()?,
        gid: r.u32()?,
        groups: r.list(|r| r.u32())?,
        umask: r.u32()?,
        cwd: r.text()?,
        args: r.list(|r| r.text())?,
        env: r.list(|r| r.text())?,
        seccomp: r.bytes()?,
        first: match (r.u8()?, r.u64()?) {
            (0, _) => First::Command,
            (1, lifetime) => First::Agent(lifetime),
            (2, _) => First::Task,
            _ => return None,
        },
        apparmor: r.text()?,
    };
    let whole = r.is_at_end()
        && !order.args.is_empty()
        && order.root.starts_with(b"/")
        && order.cwd.starts_with(b"/")
        && order.seccomp.len() % 8 == 0
        && order.seccomp.len() / 8 <= 4096;
    if whole {
        Some(order)
    } else {
        None
    }
}
