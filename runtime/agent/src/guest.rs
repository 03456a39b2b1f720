//! `/init` of a guest: the first process of a virtual machine that is a sandbox. It loads the modules that lead to its port (of virtio-serial, or of
//! vsock where the machine has that), waits for its order, makes the root, starts aether in it, and carries frames between that and the host; when
//! aether ends it says how, and switches the machine off.
//!
//! - It is to aether what the keeper is on the host: makes control groups for commands, and holds what aether sent until the host has taken it.
//! - The sandbox is in other namespaces (processes, mounts, control groups): it does not see this process, its port or the layers.
//! - Until its order it is every machine's: many may be made of its memory. So nothing asks for the kernel's boot id before that: it is made when it
//!   is first read, and is to be random.
//! - The host may go and come back at any time; without it, aether goes on until its time is up.

pub mod link;
mod network;
pub mod order;
mod root;
mod vsock;
mod work;

use crate::cgroup;
use crate::container::{failure_payload, Failure, Stage};
use crate::sys::{self, Fd, PollFd, POLLIN, POLLOUT};
use crate::wire::{self, Channel, Frame, Reader};
use link::Link;

const PORT_NAME: &[u8] = b"dsec.agent";
const PORT_MS: u64 = 30_000;
/// For what was said last to reach the host.
const FAREWELL_MS: u64 = 2_000;
/// Nobody at the other end of the port: it is looked after so often.
const ALONE_MS: i32 = 50;
const POLLHUP: i16 = 0x10;
/// An agent sends no longer frame.
const MAX_FROM_AGENT: usize = 1 << 20;
const NEW_PROCESSES: u64 = 0x20000000;
const NEW_MOUNTS: u64 = 0x20000;

pub fn is_first_process(args: &[Vec<u8>]) -> bool {
    sys::own_pid() == 1 && args.first().map_or(false, |name| name.ends_with(b"/init"))
}

/// `/init vsock-peer=N`: over the vsock that is there anyway, and not the host but that machine is heard. For tests.
pub fn main(args: &[Vec<u8>]) -> i32 {
    let peer = args.get(1).and_then(|word| word.strip_prefix(b"vsock-peer="));
    let status = match start(peer.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok())) {
        Ok(mut guest) => guest.serve(),
        Err(failure) => {
            let text = format!(
                "dsec: the guest cannot start: step {}, errno {}, {}\n",
                failure.stage as u8,
                failure.errno,
                String::from_utf8_lossy(&failure.what)
            );
            let _ = sys::write_file(b"/dev/console", text.as_bytes());
            1
        }
    };
    sys::power_off();
    status
}

struct Guest {
    link: Link,
    /// Of vsock, and who is heard there.
    listener: Option<Fd>,
    peer: u32,
    agent: Option<Channel>,
    pid: i32,
    out_of_memory: u64,
    is_over: bool,
}

fn start(peer: Option<u32>) -> std::result::Result<Guest, Failure> {
    root::begin()?;
    load_modules(b"/modules/order")?;
    let (link, listener) = match open_port(peer.is_some())? {
        Port::Serial(fd) => (Link::new(fd), None),
        Port::Vsock(fd) => (Link::of_connections(), Some(fd)),
    };
    Ok(Guest { link, listener, peer: peer.unwrap_or(vsock::HOST), agent: None, pid: 0, out_of_memory: 0, is_over: false })
}

fn load_modules(list: &[u8]) -> std::result::Result<(), Failure> {
    let names = sys::read_file(list, 4096).unwrap_or_default();
    names.split(|byte| *byte == b'\n').filter(|name| !name.is_empty()).try_for_each(root::load_module)
}

enum Port {
    Serial(Fd),
    Vsock(Fd),
}

fn open_port(has_vsock: bool) -> std::result::Result<Port, Failure> {
    let deadline = sys::now_ms() + PORT_MS;
    loop {
        for name in sys::names_in("/sys/class/virtio-ports") {
            let told = sys::read_file(&[b"/sys/class/virtio-ports/", &name[..], b"/name"].concat(), 64);
            if told.map_or(false, |told| told.starts_with(PORT_NAME)) {
                if let Ok(fd) = sys::open_at(&[b"/dev/", &name[..]].concat(), sys::O_RDWR, 0) {
                    return Ok(Port::Serial(fd));
                }
            }
        }
        if has_vsock || vsock::is_there() {
            load_modules(b"/modules/vsock-order")?;
            return match vsock::listen() {
                Ok(fd) => Ok(Port::Vsock(fd)),
                Err(errno) => Err(Failure { stage: Stage::Device, errno, what: b"vsock".to_vec() }),
            };
        }
        if sys::now_ms() > deadline {
            return Err(Failure { stage: Stage::Device, errno: sys::ENOENT, what: PORT_NAME.to_vec() });
        }
        sys::poll_fds(&mut [], 2);
    }
}

impl Guest {
    fn serve(&mut self) -> i32 {
        sys::block_signals(&sys::every_signal());
        let signals = match sys::signal_fd(&sys::sig_set(&[sys::SIGCHLD])) {
            Ok(fd) => fd,
            Err(_) => return 1,
        };
        let mut alone = false;
        let mut leave_at: Option<u64> = None;
        loop {
            if self.is_over {
                let at = *leave_at.get_or_insert_with(|| sys::now_ms() + FAREWELL_MS);
                if self.link.is_settled() || sys::now_ms() >= at {
                    work::put_away();
                    return 0;
                }
            }
            let sending = if self.link.is_sending() { POLLOUT } else { 0 };
            let mut polls = vec![
                PollFd { fd: signals.0, events: POLLIN, revents: 0 },
                // A port without anybody says so for ever.
                PollFd { fd: if alone { -1 } else { self.link.fd() }, events: POLLIN | sending, revents: 0 },
                PollFd { fd: self.listener.as_ref().map_or(-1, |fd| fd.0), events: POLLIN, revents: 0 },
            ];
            if let Some(agent) = &self.agent {
                let reading = if self.link.may_send() { POLLIN } else { 0 };
                let writing = if agent.is_sending() { POLLOUT } else { 0 };
                let fd = if reading | writing == 0 { -1 } else { agent.fd.0 };
                polls.push(PollFd { fd, events: reading | writing, revents: 0 });
            }
            let wait = if alone {
                ALONE_MS
            } else if self.is_over {
                100
            } else {
                -1
            };
            sys::poll_fds(&mut polls, wait);
            if let Some(revents) = polls.get(3).map(|poll| poll.revents).filter(|revents| *revents != 0) {
                self.read_agent(revents);
            }
            if polls[0].revents != 0 {
                while sys::next_signal(signals.0).is_some() {}
                while let Some((pid, status)) = sys::reap() {
                    self.reaped(pid, status);
                }
            }
            let came = match &self.listener {
                Some(listener) if polls[2].revents != 0 => vsock::accept(listener, self.peer),
                _ => None,
            };
            if let Some(fd) = came {
                // The host has one at a time: with a new one it has lost the one before.
                self.link.connected(fd);
            }
            let revents = polls[1].revents;
            if alone || revents != 0 {
                alone = self.listener.is_none() && revents & (POLLHUP | POLLIN) == POLLHUP;
                if revents & POLLOUT != 0 {
                    self.link.flush();
                }
                match self.link.receive() {
                    // What it sends is no protocol of ours; nobody could say so to it.
                    None => return 1,
                    Some(frames) => {
                        for frame in frames {
                            alone = false;
                            if self.handle(frame).is_none() {
                                return 1;
                            }
                        }
                    }
                }
            }
        }
    }

    /// None for what cannot be understood.
    fn handle(&mut self, frame: Frame) -> Option<()> {
        let mut r = Reader::new(&frame.payload);
        match frame.kind {
            wire::LAUNCH => self.launch(&frame.payload)?,
            wire::CANCEL => {
                if self.pid > 0 {
                    let _ = sys::send_signal(self.pid, sys::SIGKILL);
                } else {
                    self.is_over = true;
                }
            }
            wire::TO_AGENT => {
                let (kind, about) = (r.u8()?, r.u32()?);
                if let Some(agent) = &mut self.agent {
                    agent.send(kind, about, &frame.payload[5..]);
                }
            }
            wire::TO_AGENT_IN_GROUP => {
                let folder = r.text()?;
                let (kind, about) = (r.u8()?, r.u32()?);
                let payload = &frame.payload[4 + folder.len() + 5..];
                match cgroup::command_entry(&folder) {
                    Ok(entry) => {
                        if let Some(agent) = &mut self.agent {
                            agent.send_carrying(kind, about, payload, entry);
                        }
                    }
                    Err(errno) => {
                        let mut refusal = vec![Stage::Cgroup as u8];
                        refusal.extend_from_slice(&errno.to_le_bytes());
                        self.from_agent(wire::REFUSED, about, &refusal);
                    }
                }
            }
            wire::GUEST_WORK => {
                let (errno, answer) = match work::carry_out(&frame.payload)? {
                    Ok(answer) => (0i32, answer),
                    Err(errno) => (errno, Vec::new()),
                };
                let mut payload = errno.to_le_bytes().to_vec();
                payload.extend_from_slice(&answer);
                self.link.send(wire::GUEST_DONE, frame.id, &payload);
            }
            _ => return None,
        }
        Some(())
    }

    fn launch(&mut self, payload: &[u8]) -> Option<()> {
        // Again: it was told already.
        if self.pid > 0 || self.is_over {
            return Some(());
        }
        let order = order::parse(payload)?;
        match root::build(&order).and_then(|made| self.start_agent(order.lifetime_ms).map(|_| made)) {
            Ok(made) => {
                let mut payload = (self.pid as u32).to_le_bytes().to_vec();
                payload.extend_from_slice(&(made.len() as u32).to_le_bytes());
                for path in &made {
                    wire::put_bytes(&mut payload, path);
                }
                self.link.send(wire::STARTED, 0, &payload);
            }
            Err(failure) => {
                self.link.send(wire::FAILED, 0, &failure_payload(&failure));
                self.is_over = true;
            }
        }
        Some(())
    }

    fn start_agent(&mut self, lifetime_ms: u64) -> std::result::Result<(), Failure> {
        let at = |errno: i32| Failure { stage: Stage::Clone, errno, what: b"the agent".to_vec() };
        let (own, theirs) = sys::socket_pair(sys::SOCK_STREAM).map_err(at)?;
        match sys::clone_process(NEW_PROCESSES | NEW_MOUNTS).map_err(at)? {
            0 => {
                sys::unblock_all_signals();
                if let Err(failure) = root::become_agent(theirs.0, lifetime_ms) {
                    let mut frame = Vec::new();
                    wire::put_frame(&mut frame, wire::FAILED, 0, &failure_payload(&failure));
                    let _ = sys::send_with_fds(theirs.0, &frame, &[]);
                }
                unsafe { sys::_exit(127) }
            }
            pid => {
                self.pid = pid;
                self.agent = Some(Channel::new(own, 0));
                Ok(())
            }
        }
    }

    fn read_agent(&mut self, revents: i16) {
        let received = match &mut self.agent {
            Some(agent) => agent.exchange(revents, MAX_FROM_AGENT),
            None => return,
        };
        let received = match received {
            Some(received) => received,
            None => return,
        };
        for frame in received.frames {
            match frame.kind {
                // Of what was to become it.
                wire::FAILED => self.link.send(wire::FAILED, 0, &frame.payload),
                kind => {
                    if kind == wire::EXITED {
                        self.tell_memory();
                    }
                    self.from_agent(kind, frame.id, &frame.payload);
                }
            }
        }
        if !received.open {
            self.agent = None;
            let _ = sys::send_signal(self.pid, sys::SIGKILL);
        }
    }

    /// Before the exit of a command that it may have been the reason of.
    fn tell_memory(&mut self) {
        let count = work::out_of_memory_count();
        if count != self.out_of_memory {
            self.out_of_memory = count;
            self.link.send(wire::OUT_OF_MEMORY, 0, &count.to_le_bytes());
        }
    }

    fn from_agent(&mut self, kind: u8, about: u32, payload: &[u8]) {
        let mut framed = Vec::with_capacity(5 + payload.len());
        framed.push(kind);
        framed.extend_from_slice(&about.to_le_bytes());
        framed.extend_from_slice(payload);
        self.link.send(wire::FROM_AGENT, 0, &framed);
    }

    fn reaped(&mut self, pid: i32, status: i32) {
        if pid != self.pid {
            return;
        }
        // What it said last comes before its end.
        self.read_agent(POLLIN);
        self.agent = None;
        self.tell_memory();
        self.link.send(wire::ENDED, 0, &status.to_le_bytes());
        self.is_over = true;
    }
}
