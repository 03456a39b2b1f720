//! `dsec-agent client SOCKET NODE SCRIPT ARG...`: what a command is while the resident service runs it. It understands nothing of its
//! arguments: it sends them with the working directory, the environment and its own standard streams, and then passes signals on,
//! writes what the service has to say, and ends with the status it is told.
//!
//! Without a service, and with one that declines (another version, another environment, something only a process of its own can
//! do), it becomes `NODE SCRIPT ARG...`, as if it had never been there. A service declines before it does anything, so nothing
//! is ever done twice.

use std::os::raw::c_char;

use crate::sys::{self, c, Fd, PollFd, POLLIN, POLLOUT};
use crate::terminal::Relay;
use crate::wire::{self, Channel, Frame, Received};

/// For the answer whether it takes the command, and for taking the question. A service that hangs must not hang everybody.
const ANSWER_MS: i32 = 10_000;
/// The service ended in the middle: nothing is known of the command.
const LOST: i32 = 125;
/// Bit in the greeting: there is nothing to read on standard input.
const INPUT_IS_NULL: u8 = 8;
/// As SIGPIPE would have it.
const READER_GONE: i32 = 141;

const FORWARDED: [i32; 9] = [
    sys::SIGINT,
    sys::SIGTERM,
    sys::SIGHUP,
    sys::SIGQUIT,
    sys::SIGALRM,
    sys::SIGCONT,
    sys::SIGUSR1,
    sys::SIGUSR2,
    sys::SIGWINCH,
];

extern "C" {
    static environ: *const *const c_char;
}

/// `command`: the script, then its arguments.
pub fn main(socket: &[u8], node: &[u8], command: &[Vec<u8>]) -> i32 {
    open_streams();
    match greet(socket, command) {
        Some(channel) => converse(channel, node, command),
        None => become_node(node, command),
    }
}

/// One that was closed by the caller would be some other file by now.
fn open_streams() {
    for number in 0..3 {
        if !sys::is_open(number) {
            if let Ok(fd) = sys::open_at(b"/dev/null", sys::O_RDWR, 0) {
                let opened = fd.take();
                if opened != number {
                    let _ = sys::dup_to(opened, number);
                    sys::close_fd(opened);
                } else {
                    // Not close-on-exec any more: Node looks for it.
                    let _ = sys::dup_high(opened).and_then(|copy| sys::dup_to(copy.0, number));
                }
            }
        }
    }
}

fn become_node(node: &[u8], command: &[Vec<u8>]) -> i32 {
    let args: Vec<_> = std::iter::once(c(node)).chain(command.iter().map(|arg| c(arg))).collect();
    let errno = sys::exec_search(node, &args);
    let _ = sys::write_all(2, format!("dsec: node cannot be started: errno {}\n", errno).as_bytes());
    127
}

fn greet(socket: &[u8], command: &[Vec<u8>]) -> Option<Channel> {
    let fd = sys::connect_to(socket, ANSWER_MS as u64 / 1000).ok()?;
    let mut frame = Vec::new();
    wire::put_frame(&mut frame, wire::GREETING, 0, &greeting(command)?);
    // Longer than the socket's buffer: the rest follows without the descriptors.
    let mut sent = sys::send_with_fds(fd.0, &frame, &[0, 1, 2]).ok()?;
    while sent < frame.len() {
        sent += sys::send_with_fds(fd.0, &frame[sent..], &[]).ok()?;
    }
    Some(Channel::new(fd, 1))
}

fn greeting(command: &[Vec<u8>]) -> Option<Vec<u8>> {
    let mut out = wire::VERSION.to_le_bytes().to_vec();
    wire::put_bytes(&mut out, crate::BUILD.as_bytes());
    put_list(&mut out, command);
    put_list(&mut out, &environment());
    wire::put_bytes(&mut out, &sys::working_dir().unwrap_or_default());
    let terminals = (0..3).fold(0u8, |bits, fd| bits | (sys::is_terminal(fd) as u8) << fd);
    out.push(terminals | if sys::is_null_device(0) { INPUT_IS_NULL } else { 0 });
    let size = sys::terminal_size(1).or_else(|| sys::terminal_size(2));
    for value in [size.map_or(0, |s| s.rows), size.map_or(0, |s| s.columns)] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    if out.len() > wire::MAX_PAYLOAD {
        return None;
    }
    Some(out)
}

fn put_list(out: &mut Vec<u8>, items: &[Vec<u8>]) {
    out.extend_from_slice(&(items.len() as u32).to_le_bytes());
    for item in items {
        wire::put_bytes(out, item);
    }
}

fn environment() -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            found.push(std::ffi::CStr::from_ptr(*at).to_bytes().to_vec());
            at = at.add(1);
        }
    }
    found
}

struct Conversation {
    accepted: bool,
    relay: Option<Relay>,
    /// How much of our input the service takes; nothing until it says so.
    wanted: usize,
    input_open: bool,
}

enum Next {
    Go,
    Declined,
    Exit(i32),
}

fn converse(mut channel: Channel, node: &[u8], command: &[Vec<u8>]) -> i32 {
    let signals = sys::sig_set(&FORWARDED);
    sys::block_signals(&signals);
    let signal_fd = match sys::signal_fd(&signals) {
        Ok(fd) => fd,
        Err(_) => return LOST,
    };
    let mut state = Conversation { accepted: false, relay: None, wanted: 0, input_open: true };
    loop {
        let mut polls = [PollFd { fd: -1, events: POLLIN, revents: 0 }; 4];
        polls[0].fd = channel.fd.0;
        if channel.is_sending() {
            polls[0].events |= POLLOUT;
        }
        // Until it is taken, signals wait: they may be Node's yet.
        polls[1].fd = if state.accepted { signal_fd.0 } else { -1 };
        if let Some(relay) = &state.relay {
            let pair = relay.polls();
            polls[2] = pair[0];
            polls[3] = pair[1];
        } else if state.input_open && state.wanted > 0 {
            polls[3].fd = 0;
        }
        let n = sys::poll_fds(&mut polls, if state.accepted { -1 } else { ANSWER_MS });
        if n == 0 && !state.accepted {
            // Nothing more comes, and nothing is begun for us. It may have been taken at this very moment: then its sandbox ends.
            sys::shut(channel.fd.0);
            let taken = channel.receive(wire::MAX_PAYLOAD).frames.iter().any(|frame| frame.kind == wire::ACCEPTED);
            return if taken { lost() } else { leave(channel, signal_fd, node, command) };
        }
        if polls[1].revents != 0 {
            forward_signals(&mut channel, signal_fd.0, &state);
        }
        if let Some(relay) = &mut state.relay {
            relay.handle(&[polls[2], polls[3]]);
        } else if polls[3].revents != 0 {
            pass_input(&mut channel, &mut state);
        }
        channel.flush();
        if polls[0].revents & !POLLOUT == 0 {
            continue;
        }
        let Received { frames, open } = channel.receive(wire::MAX_PAYLOAD);
        for frame in frames {
            match handle(frame, &mut channel, &mut state) {
                Next::Go => {}
                Next::Declined => return leave(channel, signal_fd, node, command),
                Next::Exit(code) => return code,
            }
        }
        if open {
            continue;
        }
        if !state.accepted {
            return leave(channel, signal_fd, node, command);
        }
        if let Some(mut relay) = state.relay.take() {
            relay.finish();
        }
        return lost();
    }
}

fn lost() -> i32 {
    let text = "dsec: the runtime service has ended, and the sandbox with it\n      \
                what is left of it is removed by the next command; to see why: the log of dsec serve runtime\n";
    let _ = sys::write_all(2, text.as_bytes());
    LOST
}

/// Of one read; more is polled for. An input that cannot be read is one that has ended.
fn pass_input(channel: &mut Channel, state: &mut Conversation) {
    let mut part = [0u8; 32 << 10];
    let most = state.wanted.min(part.len());
    match sys::read_fd(0, &mut part[..most]) {
        Ok(n) if n > 0 => {
            state.wanted -= n;
            channel.send(wire::INPUT, 0, &part[..n]);
        }
        Err(sys::EAGAIN) => {}
        _ => {
            state.input_open = false;
            channel.send(wire::INPUT_END, 0, &[]);
        }
    }
}

/// Signals that came meanwhile find Node, or end us.
fn leave(channel: Channel, signal_fd: Fd, node: &[u8], command: &[Vec<u8>]) -> i32 {
    drop(channel);
    drop(signal_fd);
    sys::unblock_all_signals();
    become_node(node, command)
}

fn forward_signals(channel: &mut Channel, signal_fd: i32, state: &Conversation) {
    while let Some(number) = sys::next_signal(signal_fd) {
        if number == sys::SIGWINCH {
            if let Some(relay) = &state.relay {
                relay.resize();
            }
        }
        channel.send(wire::SIGNAL, 0, &(number as u32).to_le_bytes());
    }
}

fn handle(frame: Frame, channel: &mut Channel, state: &mut Conversation) -> Next {
    match frame.kind {
        wire::DECLINED if !state.accepted => return Next::Declined,
        wire::ACCEPTED => {
            state.accepted = true;
            // As Node does: a signal that was ignored by whoever started us is the sandbox's all the same.
            for number in FORWARDED {
                sys::default_signal(number);
            }
        }
        wire::OUTPUT if !frame.payload.is_empty() => {
            let fd = if frame.payload[0] == 1 { 1 } else { 2 };
            let bytes = &frame.payload[1..];
            let written = sys::write_all(fd, bytes);
            if fd == 1 && matches!(written, Err(sys::EPIPE)) {
                return Next::Exit(READER_GONE);
            }
            channel.send(wire::OUTPUT_TAKEN, 0, &(bytes.len() as u32).to_le_bytes());
        }
        wire::INPUT_WANTED if frame.payload.len() == 4 => {
            let p = &frame.payload;
            state.wanted += u32::from_le_bytes([p[0], p[1], p[2], p[3]]) as usize;
        }
        wire::TERMINAL => {
            if let Some(master) = channel.fds.pop() {
                state.relay = Some(Relay::new(master));
            }
        }
        wire::EXIT if frame.payload.len() == 4 => {
            if let Some(mut relay) = state.relay.take() {
                relay.finish();
            }
            let p = &frame.payload;
            return Next::Exit(i32::from_le_bytes([p[0], p[1], p[2], p[3]]));
        }
        _ => {}
    }
    Next::Go
}
