//! `dsec-agent launch [SOCKET]`: a process that starts sandboxes for the Node process at the other end of descriptor 3 and tells it how
//! they end. It holds no state that outlives it and decides nothing: an order says all (order.rs).
//!
//! With SOCKET it also is the door of the resident service: it listens there, takes clients' standard streams, which never pass
//! through Node, and carries frames between each client and Node.
//!
//! - Node gone (end of descriptor 3): every sandbox is killed, and this process ends.
//! - A client gone: Node is told, and ends its sandbox.
//! - This process gone: every sandbox is killed by the kernel (parent-death signal), and Node sees the socket end.
//!
//! One thread, one loop; nothing in it waits for a peer.

use std::collections::HashMap;

use crate::cgroup;
use crate::container::{self, Failure, Stage};
use crate::order::{self, Cgroup, Preparation, Stdio};
use crate::selfcopy;
use crate::sys::{self, Fd, PollFd, POLLIN, POLLOUT};
use crate::terminal::Relay;
use crate::wire::{self, Channel, Received};

const CONTROL: i32 = 3;
/// What a client that does not read may have waiting before it counts as gone.
const CLIENT_BACKLOG: usize = 4 << 20;

struct Sandbox {
    pid: i32,
    /// Until the exec, or the failure before it.
    status: Option<Channel>,
    /// What it told of its failure: passed on when nothing of it is left.
    failure: Option<Vec<u8>>,
    cgroups: Vec<Cgroup>,
    client: Option<u32>,
    /// It has a user namespace, and cannot get to its root by itself.
    mapped: bool,
}

struct Client {
    channel: Channel,
    pid: i32,
    greeted: bool,
    /// Nothing more is to come: it goes when all is sent.
    closing: bool,
}

struct Launcher {
    control: Channel,
    listener: Option<Fd>,
    sandboxes: HashMap<u32, Sandbox>,
    clients: HashMap<u32, Client>,
    next_client: u32,
    relay: Option<(u32, Relay)>,
}

pub fn main(args: &[Vec<u8>]) -> i32 {
    if let Err(errno) = selfcopy::ensure(args) {
        let _ = sys::write_all(2, format!("dsec-agent: no sealed copy of itself: errno {}\n", errno).as_bytes());
        return 1;
    }
    let _ = sys::prctl1(sys::PR_SET_DUMPABLE, 0);
    sys::default_signals();
    sys::ignore_signal(sys::SIGPIPE);
    let signals = sys::sig_set(&[
        sys::SIGCHLD,
        sys::SIGWINCH,
        sys::SIGINT,
        sys::SIGTERM,
        sys::SIGHUP,
        sys::SIGQUIT,
        sys::SIGALRM,
        sys::SIGUSR1,
        sys::SIGUSR2,
    ]);
    sys::block_signals(&signals);
    let signal_fd = match sys::signal_fd(&signals) {
        Ok(fd) => fd,
        Err(_) => return 1,
    };
    // Descriptors that whoever started us forgot to close are not for sandboxes.
    sys::close_range(4, signal_fd.0 as u32 - 1, false);
    sys::close_range(3, u32::MAX, true);
    let listener = match args.get(2) {
        None => None,
        Some(path) => {
            let _ = sys::unlink_file(path);
            match sys::listen_at(path) {
                Ok(fd) => Some(fd),
                Err(errno) => {
                    let _ = sys::write_all(2, format!("dsec-agent: cannot listen: errno {}\n", errno).as_bytes());
                    return 1;
                }
            }
        }
    };
    let mut launcher = Launcher {
        control: Channel::new(Fd(CONTROL), 0),
        listener,
        sandboxes: HashMap::new(),
        clients: HashMap::new(),
        next_client: 1,
        relay: None,
    };
    let mut ready = wire::VERSION.to_le_bytes().to_vec();
    wire::put_bytes(&mut ready, crate::BUILD.as_bytes());
    launcher.control.send(wire::READY, sys::own_pid() as u32, &ready);
    launcher.serve(signal_fd.0)
}

/// What a descriptor in the poll set belongs to.
#[derive(Clone, Copy)]
enum Source {
    Control,
    Signals,
    Listener,
    Client(u32),
    Status(u32),
    Relay,
}

impl Launcher {
    fn serve(&mut self, signal_fd: i32) -> i32 {
        loop {
            let (mut polls, sources) = self.poll_set(signal_fd);
            sys::poll_fds(&mut polls, -1);
            let mut relayed = false;
            for (i, source) in sources.iter().enumerate() {
                if polls[i].revents == 0 {
                    continue;
                }
                match *source {
                    Source::Control => {
                        if !self.read_control(polls[i].revents) {
                            return self.end();
                        }
                    }
                    Source::Signals => self.read_signals(signal_fd),
                    Source::Listener => self.accept(),
                    Source::Client(id) => self.read_client(id, polls[i].revents),
                    Source::Status(id) => self.read_status(id, polls[i].revents),
                    Source::Relay if !relayed => {
                        relayed = true;
                        let at = if i > 0 && matches!(sources[i - 1], Source::Relay) { i - 1 } else { i };
                        let pair = [polls[at], polls[at + 1]];
                        if let Some((_, relay)) = &mut self.relay {
                            relay.handle(&pair);
                        }
                    }
                    Source::Relay => {}
                }
            }
        }
    }

    fn poll_set(&self, signal_fd: i32) -> (Vec<PollFd>, Vec<Source>) {
        let mut polls = Vec::new();
        let mut sources = Vec::new();
        let mut add = |fd: i32, events: i16, source: Source| {
            polls.push(PollFd { fd, events, revents: 0 });
            sources.push(source);
        };
        let writing = |channel: &Channel| if channel.is_sending() { POLLIN | POLLOUT } else { POLLIN };
        add(self.control.fd.0, writing(&self.control), Source::Control);
        // How a sandbox began is read before how it ended.
        for (id, sandbox) in &self.sandboxes {
            if let Some(status) = &sandbox.status {
                add(status.fd.0, writing(status), Source::Status(*id));
            }
        }
        add(signal_fd, POLLIN, Source::Signals);
        if let Some(listener) = &self.listener {
            add(listener.0, POLLIN, Source::Listener);
        }
        for (id, client) in &self.clients {
            add(client.channel.fd.0, writing(&client.channel), Source::Client(*id));
        }
        if let Some((_, relay)) = &self.relay {
            let [master, input] = relay.polls();
            add(master.fd, master.events, Source::Relay);
            add(input.fd, input.events, Source::Relay);
        }
        (polls, sources)
    }

    fn read_control(&mut self, ready: i16) -> bool {
        let Received { frames, open } = match self.control.exchange(ready, wire::MAX_PAYLOAD) {
            Some(received) => received,
            None => return true,
        };
        if !open {
            return false;
        }
        for frame in frames {
            match frame.kind {
                wire::PREPARE => self.prepare(frame.id, &frame.payload),
                wire::LAUNCH => self.launch(frame.id, &frame.payload),
                wire::CANCEL => self.cancel(frame.id),
                wire::TO_CLIENT => self.to_client(frame.id, &frame.payload),
                wire::CLOSE_LISTENER => self.listener = None,
                _ => return false,
            }
        }
        true
    }

    fn fail(&mut self, id: u32, stage: Stage, errno: i32, what: &[u8]) {
        let failure = Failure { stage, errno, what: what.to_vec() };
        self.control.send(wire::FAILED, id, &container::failure_payload(&failure));
    }

    fn prepare(&mut self, id: u32, payload: &[u8]) {
        let preparation = match order::parse_preparation(payload) {
            Some(preparation) if !self.sandboxes.contains_key(&id) => preparation,
            _ => return self.fail(id, Stage::Order, sys::EINVAL, b"order"),
        };
        let (stdio, client) = match self.streams_for(&preparation) {
            Some(found) => found,
            None => return self.fail(id, Stage::Stdio, sys::ENOENT, b"client"),
        };
        match container::start(&preparation, &stdio) {
            Err(failure) => self.control.send(wire::FAILED, id, &container::failure_payload(&failure)),
            Ok((pid, status)) => {
                let mapped = preparation.is_mapped();
                let Preparation { cgroups, .. } = preparation;
                self.sandboxes.insert(id, Sandbox { pid, status: Some(status), failure: None, cgroups, client, mapped });
                if mapped {
                    self.control.send(wire::PREPARED, id, &(pid as u32).to_le_bytes());
                }
            }
        }
    }

    fn launch(&mut self, id: u32, payload: &[u8]) {
        // Its process may have failed already: then that was told.
        if let Some(Sandbox { status: Some(status), mapped, pid, failure, .. }) = self.sandboxes.get_mut(&id) {
            if let Err(problem) = container::send_order(status, id, payload, *mapped) {
                *failure = Some(container::failure_payload(&problem));
                let _ = sys::send_signal(*pid, sys::SIGKILL);
            }
        }
    }

    fn cancel(&mut self, id: u32) {
        if let Some(sandbox) = self.sandboxes.get(&id) {
            let _ = sys::send_signal(sandbox.pid, sys::SIGKILL);
        }
    }

    /// Taken from the client: when its sandbox has ended, its readers must see the end of its streams.
    fn streams_for(&mut self, order: &Preparation) -> Option<(Vec<Fd>, Option<u32>)> {
        match order.stdio {
            Stdio::Own => Some((Vec::new(), None)),
            Stdio::Client(id) => {
                let client = self.clients.get_mut(&id)?;
                // One that has lost its patience does the command itself.
                if client.channel.fds.len() != 3 || sys::is_hung_up(client.channel.fd.0) {
                    return None;
                }
                Some((std::mem::take(&mut client.channel.fds), Some(id)))
            }
        }
    }

    fn read_status(&mut self, id: u32, ready: i16) {
        let sandbox = match self.sandboxes.get_mut(&id) {
            Some(sandbox) => sandbox,
            None => return,
        };
        let status = match &mut sandbox.status {
            Some(status) => status,
            None => return,
        };
        let Received { frames, open } = match status.exchange(ready, 8192) {
            Some(received) => received,
            None => return,
        };
        let masters = std::mem::take(&mut status.fds);
        let client = sandbox.client;
        if !open {
            sandbox.status = None;
        }
        for frame in frames {
            if frame.kind == wire::FAILED {
                sandbox.failure = Some(frame.payload);
                sandbox.status = None;
            }
        }
        let (pid, failed) = (sandbox.pid as u32, sandbox.failure.is_some());
        for master in masters {
            match client {
                None => self.relay = Some((id, Relay::new(master))),
                Some(one) => {
                    if let Some(client) = self.clients.get_mut(&one) {
                        client.channel.send_fd(wire::TERMINAL, 0, master.0);
                    }
                }
            }
        }
        // The end of the socket: the command runs, or the process was killed on the way; then its end comes next.
        if !open && !failed {
            self.control.send(wire::STARTED, id, &pid.to_le_bytes());
        }
    }

    fn read_signals(&mut self, signal_fd: i32) {
        let mut children = false;
        while let Some(number) = sys::next_signal(signal_fd) {
            match number {
                sys::SIGCHLD => children = true,
                sys::SIGWINCH => {
                    if let Some((_, relay)) = &self.relay {
                        relay.resize();
                    }
                }
                // Node has its own copy of what the terminal sends, and is the one to say what comes of it.
                _ => {}
            }
        }
        if children {
            while let Some((pid, status)) = sys::reap() {
                self.ended(pid, status);
            }
        }
    }

    fn ended(&mut self, pid: i32, status: i32) {
        let id = match self.sandboxes.iter().find(|(_, sandbox)| sandbox.pid == pid) {
            Some((id, _)) => *id,
            None => return,
        };
        // Whatever it said before it ended.
        self.read_status(id, POLLIN);
        let sandbox = match self.sandboxes.remove(&id) {
            Some(sandbox) => sandbox,
            None => return,
        };
        if matches!(&self.relay, Some((of, _)) if *of == id) {
            if let Some((_, mut relay)) = self.relay.take() {
                relay.finish();
            }
        }
        cgroup::remove_uncounted(&sandbox.cgroups);
        match sandbox.failure {
            Some(failure) => self.control.send(wire::FAILED, id, &failure),
            None => self.control.send(wire::ENDED, id, &status.to_le_bytes()),
        }
    }

    fn accept(&mut self) {
        for _ in 0..64 {
            let fd = match &self.listener {
                Some(listener) => match sys::accept_one(listener.0) {
                    Ok(fd) => fd,
                    Err(_) => return,
                },
                None => return,
            };
            // The socket file is root's alone already; the kernel's word counts.
            let pid = match sys::peer_of(fd.0) {
                Ok(peer) if peer.uid == 0 => peer.pid,
                _ => continue,
            };
            let id = self.next_client;
            self.next_client = self.next_client.wrapping_add(1).max(1);
            let client = Client { channel: Channel::new(fd, 3), pid, greeted: false, closing: false };
            self.clients.insert(id, client);
        }
    }

    fn read_client(&mut self, id: u32, ready: i16) {
        let client = match self.clients.get_mut(&id) {
            Some(client) => client,
            None => return,
        };
        let received = client.channel.exchange(ready, wire::MAX_PAYLOAD);
        if client.closing && !client.channel.is_sending() {
            self.clients.remove(&id);
            return;
        }
        let Received { frames, open } = match received {
            Some(received) => received,
            None => return,
        };
        let mut gone = !open;
        for frame in frames {
            match frame.kind {
                wire::GREETING if !client.greeted && client.channel.fds.len() == 3 => {
                    client.greeted = true;
                    let mut payload = (client.pid as u32).to_le_bytes().to_vec();
                    payload.extend_from_slice(&frame.payload);
                    self.control.send(wire::CLIENT, id, &payload);
                }
                wire::SIGNAL if client.greeted && frame.payload.len() == 4 => {
                    self.control.send(wire::CLIENT_SIGNAL, id, &frame.payload);
                }
                wire::INPUT | wire::INPUT_END | wire::OUTPUT_TAKEN if client.greeted => {
                    let payload = [&[frame.kind][..], &frame.payload].concat();
                    self.control.send(wire::CLIENT_STREAM, id, &payload);
                }
                _ => gone = true,
            }
        }
        if gone {
            let told = client.greeted && !client.closing;
            self.clients.remove(&id);
            if told {
                self.control.send(wire::CLIENT_GONE, id, &[]);
            }
        }
    }

    /// `payload`: the type of the frame, then what is in it.
    fn to_client(&mut self, id: u32, payload: &[u8]) {
        let client = match self.clients.get_mut(&id) {
            Some(client) if !payload.is_empty() => client,
            _ => return,
        };
        client.channel.send(payload[0], 0, &payload[1..]);
        if payload[0] == wire::EXIT || payload[0] == wire::DECLINED {
            client.closing = true;
            client.channel.fds.clear();
            if !client.channel.is_sending() {
                self.clients.remove(&id);
            }
        } else if client.channel.waiting_bytes() > CLIENT_BACKLOG {
            self.clients.remove(&id);
            self.control.send(wire::CLIENT_GONE, id, &[]);
        }
    }

    /// Nobody is there who would end them later.
    fn end(&mut self) -> i32 {
        self.listener = None;
        for sandbox in self.sandboxes.values() {
            let _ = sys::send_signal(sandbox.pid, sys::SIGKILL);
        }
        if let Some((_, mut relay)) = self.relay.take() {
            relay.finish();
        }
        for _ in 0..5000 {
            while let Some((pid, _)) = sys::reap() {
                if let Some((id, _)) = self.sandboxes.iter().find(|(_, sandbox)| sandbox.pid == pid) {
                    let id = *id;
                    if let Some(sandbox) = self.sandboxes.remove(&id) {
                        cgroup::remove(&sandbox.cgroups);
                    }
                }
            }
            if self.sandboxes.is_empty() {
                break;
            }
            sys::poll_fds(&mut [], 1);
        }
        0
    }
}
