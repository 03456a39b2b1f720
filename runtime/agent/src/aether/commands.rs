//! Commands while they run: what they write and what is written to them, and how they end.

use super::{Agent, Ended, Output, PART, STDERR, STDOUT, TERMINAL_GRACE_MS, TERMINAL_LAST_MS};
use crate::sys;
use crate::wire;

impl Agent {
    /// Its end is the exec; what comes before it is a failure.
    pub(super) fn read_status(&mut self, id: u32) {
        let command = match self.commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        let status = match &command.status {
            Some(status) => status,
            None => return,
        };
        let mut part = [0u8; 5];
        match sys::read_fd(status.0, &mut part) {
            Ok(5) => {
                self.commands.remove(&id);
                self.refuse(id, part[0], i32::from_le_bytes([part[1], part[2], part[3], part[4]]));
            }
            Err(sys::EAGAIN) => {}
            _ => {
                command.status = None;
                let pid = command.pid as u32;
                self.channel.send(wire::RUNS, id, &pid.to_le_bytes());
            }
        }
    }

    pub(super) fn read_output(&mut self, id: u32, index: usize) {
        let Agent { channel, commands, .. } = self;
        let command = match commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        // It had two when it was polled.
        let output = match command.outputs.get_mut(index) {
            Some(output) if output.credit() > 0 => output,
            _ => return,
        };
        let mut payload = vec![0u8; 9 + PART.min(output.credit() as usize)];
        match sys::read_fd(output.fd.0, &mut payload[9..]) {
            Ok(n) if n > 0 => {
                payload.truncate(9 + n);
                payload[0] = output.number;
                payload[1..9].copy_from_slice(&output.sent.to_le_bytes());
                output.sent += n as u64;
                channel.send(wire::DATA, id, &payload);
                if let Some(ended) = &mut command.ended {
                    ended.at = ended.last.min(sys::now_ms() + TERMINAL_GRACE_MS);
                }
            }
            Err(sys::EAGAIN) => {}
            // EIO of a terminal: nobody has its other end.
            _ => {
                // A terminal whose last program has closed it may be opened again, but not while it lives no more.
                let mut end = vec![output.number];
                end.extend_from_slice(&output.sent.to_le_bytes());
                channel.send(wire::END_OF_STREAM, id, &end);
                let number = output.number;
                command.outputs.retain(|output| output.number != number);
            }
        }
    }

    pub(super) fn write_input(&mut self, id: u32, script: bool) {
        let Agent { channel, commands, .. } = self;
        let command = match commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        let terminal = command.terminal;
        let slot = if script { &mut command.script } else { &mut command.stdin };
        let input = match slot {
            Some(input) => input,
            None => return,
        };
        let mut taken = 0u32;
        let mut gone = false;
        while !input.waiting.is_empty() {
            match sys::write_fd(input.fd.0, &input.waiting) {
                Ok(n) => {
                    input.waiting.drain(..n);
                    taken += n as u32;
                }
                Err(sys::EAGAIN) => break,
                Err(_) => {
                    gone = true;
                    break;
                }
            }
        }
        if input.waiting.is_empty() && input.closing {
            if terminal {
                // What a user types at the beginning of a line.
                let _ = sys::write_fd(input.fd.0, &[4]);
            }
            gone = true;
        }
        if gone {
            *slot = None;
        }
        if script {
            return;
        }
        if taken > 0 {
            channel.send(wire::STDIN_TAKEN, id, &taken.to_le_bytes());
        }
        if gone {
            channel.send(wire::STDIN_GONE, id, &[]);
        }
    }

    /// With each: how much was written before it.
    pub(super) fn read_marks(&mut self, id: u32) {
        let Agent { channel, commands, .. } = self;
        let command = match commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        let marks = match &command.marks {
            Some(marks) => marks,
            None => return,
        };
        let mut part = [0u8; 256];
        match sys::read_fd(marks.0, &mut part) {
            Err(sys::EAGAIN) => {}
            Ok(n) if n > 0 => {
                let mut payload = totals(&command.outputs);
                payload.extend_from_slice(&part[..n]);
                channel.send(wire::MARK, id, &payload);
            }
            _ => {
                command.marks = None;
                channel.send(wire::MARK, id, &totals(&command.outputs));
            }
        }
    }

    pub(super) fn reaped(&mut self, pid: i32, status: i32) {
        let found = self.commands.iter().find(|(_, command)| command.pid == pid && command.ended.is_none());
        let id = match found {
            Some((id, _)) => *id,
            None => return,
        };
        // Whether it ever ran, and what it marked, comes first.
        self.read_status(id);
        self.read_marks(id);
        if let Some(command) = self.commands.get_mut(&id) {
            let now = sys::now_ms();
            command.ended = Some(Ended { status, at: now + TERMINAL_GRACE_MS, last: now + TERMINAL_LAST_MS });
            command.stdin = None;
            command.script = None;
        }
    }

    pub(super) fn tell_ends(&mut self) {
        let now = sys::now_ms();
        let Agent { channel, commands, .. } = self;
        for (id, command) in commands.iter_mut() {
            let (status, at) = match &command.ended {
                Some(ended) if !command.is_over => (ended.status, ended.at),
                _ => continue,
            };
            if command.terminal && !command.outputs.is_empty() {
                let starved = command.outputs.iter().any(|output| output.credit() == 0);
                if starved || now < at {
                    continue;
                }
            }
            command.is_over = true;
            let mut payload = status.to_le_bytes().to_vec();
            payload.extend_from_slice(&totals(&command.outputs));
            channel.send(wire::EXITED, *id, &payload);
        }
        commands.retain(|_, command| !(command.is_over && command.outputs.is_empty()));
    }
}

/// Of standard output and error: what was sent and what lies in the pipe. `u64::MAX` for one that has ended: all of it.
fn totals(outputs: &[Output]) -> Vec<u8> {
    let mut out = Vec::new();
    for number in [STDOUT, STDERR] {
        let total = outputs
            .iter()
            .find(|output| output.number == number)
            .map_or(u64::MAX, |output| output.sent + sys::readable_bytes(output.fd.0));
        out.extend_from_slice(&total.to_le_bytes());
    }
    out
}
