//! Between the user's terminal and the sandbox's: bytes both ways, and the size. The user's is raw meanwhile, so that Ctrl-C is a
//! byte for the sandbox.

use crate::sys::{self, Fd, PollFd, Termios, EAGAIN, POLLIN, POLLOUT};

pub struct Relay {
    master: Fd,
    saved: Option<Termios>,
    /// Read from the user, not yet taken by the sandbox.
    pending: Vec<u8>,
    input_open: bool,
    output_open: bool,
}

impl Relay {
    pub fn new(master: Fd) -> Relay {
        sys::set_nonblocking(master.0);
        let saved = sys::terminal_state(0).ok();
        if let Some(state) = &saved {
            let _ = sys::set_terminal_state(0, &sys::raw(*state));
        }
        let relay = Relay { master, saved, pending: Vec::new(), input_open: true, output_open: true };
        relay.resize();
        relay
    }

    pub fn resize(&self) {
        if let Some(mut size) = sys::terminal_size(0).or_else(|| sys::terminal_size(1)) {
            let _ = sys::ioctl_ptr(self.master.0, sys::TIOCSWINSZ, &mut size);
        }
    }

    /// What it waits for: the sandbox's terminal, then the user's.
    pub fn polls(&self) -> [PollFd; 2] {
        let mut events = if self.output_open { POLLIN } else { 0 };
        if !self.pending.is_empty() {
            events |= POLLOUT;
        }
        let reads = self.input_open && self.pending.is_empty();
        [
            PollFd { fd: if events == 0 { -1 } else { self.master.0 }, events, revents: 0 },
            PollFd { fd: if reads { 0 } else { -1 }, events: POLLIN, revents: 0 },
        ]
    }

    pub fn handle(&mut self, ready: &[PollFd]) {
        if ready[0].revents & !POLLOUT != 0 {
            self.copy_out();
        }
        if ready[1].revents != 0 {
            let mut part = [0u8; 4096];
            match sys::read_fd(0, &mut part) {
                Ok(0) | Err(_) => self.input_open = false,
                Ok(n) => self.pending.extend_from_slice(&part[..n]),
            }
        }
        self.copy_in();
    }

    fn copy_in(&mut self) {
        while !self.pending.is_empty() {
            match sys::write_fd(self.master.0, &self.pending) {
                Ok(n) => {
                    self.pending.drain(..n);
                }
                Err(EAGAIN) => return,
                Err(_) => self.pending.clear(),
            }
        }
    }

    /// False when there is nothing more now.
    fn copy_out(&mut self) -> bool {
        let mut part = [0u8; 16384];
        match sys::read_fd(self.master.0, &mut part) {
            Ok(n) if n > 0 => sys::write_all(1, &part[..n]).is_ok(),
            Err(EAGAIN) => false,
            // EIO: nobody has the other end open.
            _ => {
                self.output_open = false;
                false
            }
        }
    }

    /// The sandbox has ended: what it wrote last, then the user's terminal as it was.
    pub fn finish(&mut self) {
        while self.output_open {
            if !self.copy_out() && self.output_open {
                let mut one = [PollFd { fd: self.master.0, events: POLLIN, revents: 0 }];
                if sys::poll_fds(&mut one, 1000) == 0 {
                    break;
                }
            }
        }
        self.restore();
    }

    fn restore(&mut self) {
        if let Some(state) = self.saved.take() {
            let _ = sys::set_terminal_state(0, &state);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.restore();
    }
}
