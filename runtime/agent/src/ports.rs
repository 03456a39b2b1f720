//! Connections to ports inside the sandbox, for the host: opened here, so they need no link to the sandbox and no way out of it. Bytes go
//! both ways under the host's control: of what a service writes the host takes a window, of what is written to it so much is told
//! as it took.

use std::collections::HashMap;
use std::os::raw::{c_int, c_void};

use crate::aether::BACKLOG;
use crate::sys::{self, Fd, Result, POLLERR, POLLHUP, POLLIN, POLLOUT};
use crate::wire::{self, Channel, Frame, Reader};

extern "C" {
    fn shutdown(fd: c_int, how: c_int) -> c_int;
    fn getsockopt(fd: c_int, level: c_int, option: c_int, value: *mut c_void, length: *mut u32) -> c_int;
    fn setsockopt(fd: c_int, level: c_int, option: c_int, value: *const c_void, length: u32) -> c_int;
}

const AF_INET6: i32 = 10;
const SHUT_WR: c_int = 1;
const EPIPE: i32 = 32;
const EINPROGRESS: i32 = 115;
const PART: usize = 32 << 10;
/// Each may have this much waiting for its service.
const MAX_WAITING: usize = 256 << 10;
const MAX_CONNECTIONS: usize = 1024;

struct Connection {
    fd: Fd,
    port: u16,
    is_v6: bool,
    connecting: bool,
    /// On its way to the service.
    waiting: Vec<u8>,
    /// The host writes no more; `shut`: and the service knows.
    closing: bool,
    shut: bool,
    received: u64,
    /// The host takes bytes before this offset.
    limit: u64,
    /// The service writes no more.
    ended: bool,
}

impl Connection {
    /// What to poll for. None: nothing; what may not be read would be told of for ever. With 0 a reset is told.
    fn events(&self, may_read: bool) -> Option<i16> {
        if self.connecting {
            return Some(POLLOUT);
        }
        let reads = may_read && !self.ended && self.received < self.limit;
        let events = (if reads { POLLIN } else { 0 }) | (if self.waiting.is_empty() { 0 } else { POLLOUT });
        if events != 0 || self.ended {
            Some(events)
        } else {
            None
        }
    }
}

pub struct Ports {
    connections: HashMap<u32, Connection>,
}

impl Ports {
    pub fn new() -> Ports {
        Ports { connections: HashMap::new() }
    }

    pub fn polls(&self, may_read: bool) -> impl Iterator<Item = (u32, i32, i16)> + '_ {
        self.connections.iter().filter_map(move |(id, one)| one.events(may_read).map(|events| (*id, one.fd.0, events)))
    }

    /// None for what cannot be understood. A connection that has gone meanwhile is no error.
    pub fn handle(&mut self, frame: &Frame, channel: &mut Channel) -> Option<()> {
        let id = frame.id;
        let mut r = Reader::new(&frame.payload);
        match frame.kind {
            wire::CONNECT => {
                let (port, window) = (r.u16()?, r.u32()?);
                if !r.is_at_end() || id == 0 || self.connections.contains_key(&id) {
                    return None;
                }
                if self.connections.len() >= MAX_CONNECTIONS {
                    close(channel, id, sys::EMFILE);
                    return Some(());
                }
                match open(port) {
                    Err(errno) => close(channel, id, errno),
                    Ok((fd, is_v6)) => {
                        let connection = Connection {
                            fd,
                            port,
                            is_v6,
                            connecting: true,
                            waiting: Vec::new(),
                            closing: false,
                            shut: false,
                            received: 0,
                            limit: window as u64,
                            ended: false,
                        };
                        self.connections.insert(id, connection);
                    }
                }
            }
            wire::SEND => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    if connection.closing || connection.waiting.len() + frame.payload.len() > MAX_WAITING {
                        return None;
                    }
                    connection.waiting.extend_from_slice(&frame.payload);
                    self.write(id, channel);
                }
            }
            wire::SEND_END => {
                if !r.is_at_end() {
                    return None;
                }
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.closing = true;
                    self.write(id, channel);
                }
            }
            _ => return None,
        }
        Some(())
    }

    pub fn take(&mut self, id: u32, limit: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.limit = connection.limit.max(limit);
        }
    }

    /// The host has no use for it any more; 0: for none.
    pub fn close(&mut self, id: u32) {
        if id == 0 {
            self.connections.clear();
        } else {
            self.connections.remove(&id);
        }
    }

    pub fn ready(&mut self, id: u32, events: i16, channel: &mut Channel) {
        let connection = match self.connections.get(&id) {
            Some(connection) => connection,
            None => return,
        };
        if connection.connecting {
            return self.connected(id, channel);
        }
        // Otherwise what lies there is read first.
        if connection.ended && events & (POLLERR | POLLHUP) != 0 {
            let errno = error_of(connection.fd.0);
            return self.end(id, if errno == 0 { EPIPE } else { errno }, channel);
        }
        if events & (POLLOUT | POLLERR) != 0 {
            self.write(id, channel);
        }
        if events & !POLLOUT != 0 {
            self.read(id, channel);
        }
    }

    /// Who listens at the one loopback address alone is found too.
    fn connected(&mut self, id: u32, channel: &mut Channel) {
        let connection = match self.connections.get_mut(&id) {
            Some(connection) => connection,
            None => return,
        };
        let errno = error_of(connection.fd.0);
        if errno == 0 {
            connection.connecting = false;
            channel.send(wire::CONNECTED, id, &[]);
            return self.write(id, channel);
        }
        if !connection.is_v6 {
            if let Ok(fd) = open_at(connection.port, true) {
                connection.fd = fd;
                connection.is_v6 = true;
                return;
            }
        }
        self.end(id, errno, channel);
    }

    fn read(&mut self, id: u32, channel: &mut Channel) {
        let connection = match self.connections.get_mut(&id) {
            Some(connection) if !connection.ended && connection.received < connection.limit => connection,
            _ => return,
        };
        // Others may have filled it since it was polled.
        if channel.waiting_bytes() >= BACKLOG {
            return;
        }
        let room = (connection.limit - connection.received).min(PART as u64) as usize;
        // Not on the stack: what the agent's loop once needed of that would stay its own.
        let mut part = vec![0u8; room];
        match sys::read_fd(connection.fd.0, &mut part) {
            Ok(0) => {
                connection.ended = true;
                channel.send(wire::RECEIVED_END, id, &[]);
                self.end_if_over(id, channel);
            }
            Ok(n) => {
                connection.received += n as u64;
                channel.send(wire::RECEIVED, id, &part[..n]);
            }
            Err(sys::EAGAIN) => {}
            Err(errno) => self.end(id, errno, channel),
        }
    }

    fn write(&mut self, id: u32, channel: &mut Channel) {
        let connection = match self.connections.get_mut(&id) {
            Some(connection) if !connection.connecting && !connection.shut => connection,
            _ => return,
        };
        let mut taken = 0;
        while taken < connection.waiting.len() {
            match sys::write_fd(connection.fd.0, &connection.waiting[taken..]) {
                Ok(n) => taken += n,
                Err(sys::EAGAIN) => break,
                Err(errno) => return self.end(id, errno, channel),
            }
        }
        connection.waiting.drain(..taken);
        if connection.waiting.is_empty() {
            connection.waiting = Vec::new();
        }
        if taken > 0 {
            channel.send(wire::SENT, id, &(taken as u32).to_le_bytes());
        }
        if connection.waiting.is_empty() && connection.closing {
            connection.shut = true;
            unsafe { shutdown(connection.fd.0, SHUT_WR) };
            self.end_if_over(id, channel);
        }
    }

    fn end_if_over(&mut self, id: u32, channel: &mut Channel) {
        if matches!(self.connections.get(&id), Some(connection) if connection.ended && connection.shut) {
            self.end(id, 0, channel);
        }
    }

    fn end(&mut self, id: u32, errno: i32, channel: &mut Channel) {
        self.connections.remove(&id);
        close(channel, id, errno);
    }
}

fn close(channel: &mut Channel, id: u32, errno: i32) {
    channel.send(wire::CLOSED, id, &errno.to_le_bytes());
}

/// The errno is that of 127.0.0.1.
fn open(port: u16) -> Result<(Fd, bool)> {
    match open_at(port, false) {
        Ok(fd) => Ok((fd, false)),
        Err(errno) => open_at(port, true).map(|fd| (fd, true)).map_err(|_| errno),
    }
}

fn open_at(port: u16, is_v6: bool) -> Result<Fd> {
    const TCP_NODELAY: c_int = 1;
    const IPPROTO_TCP: c_int = 6;
    let fd = sys::new_socket(if is_v6 { AF_INET6 } else { sys::AF_INET }, sys::SOCK_STREAM | sys::O_NONBLOCK)?;
    let one: c_int = 1;
    unsafe { setsockopt(fd.0, IPPROTO_TCP, TCP_NODELAY, &one as *const c_int as *const c_void, 4) };
    // struct sockaddr_in and sockaddr_in6: family, port (big-endian), then 127.0.0.1, or flow information and ::1.
    let mut address = [0u8; 28];
    let family = if is_v6 { AF_INET6 } else { sys::AF_INET } as u16;
    address[..2].copy_from_slice(&family.to_ne_bytes());
    address[2..4].copy_from_slice(&port.to_be_bytes());
    if is_v6 {
        address[23] = 1;
    } else {
        address[4..8].copy_from_slice(&[127, 0, 0, 1]);
    }
    match sys::connect_socket(fd.0, &address[..if is_v6 { 28 } else { 16 }]) {
        // How it went is asked when it can be written to.
        Ok(()) | Err(EINPROGRESS) | Err(sys::EINTR) => {}
        Err(errno) => return Err(errno),
    }
    Ok(fd)
}

fn error_of(fd: i32) -> i32 {
    const SOL_SOCKET: c_int = 1;
    const SO_ERROR: c_int = 4;
    let mut errno: c_int = 0;
    let mut length = 4u32;
    if unsafe { getsockopt(fd, SOL_SOCKET, SO_ERROR, &mut errno as *mut c_int as *mut c_void, &mut length) } < 0 {
        return sys::errno();
    }
    errno
}
