//! The guest's network: messages for the kernel as the host has written them (runtime/network/sandbox-link.ts makes the same ones for containers),
//! one after the other, each with its answer.

use crate::guest::order::Message;
use crate::sys;

const AF_NETLINK: i32 = 16;
const SOCK_RAW: i32 = 3;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const HEADER: usize = 16;

/// Number of the one that failed.
pub fn apply(messages: &[Message]) -> std::result::Result<(), (i32, usize)> {
    if messages.is_empty() {
        return Ok(());
    }
    let socket = sys::new_socket(AF_NETLINK, SOCK_RAW).map_err(|errno| (errno, 0))?;
    for (at, message) in messages.iter().enumerate() {
        let mut bytes = Vec::with_capacity(HEADER + message.payload.len());
        bytes.extend_from_slice(&((HEADER + message.payload.len()) as u32).to_le_bytes());
        bytes.extend_from_slice(&message.kind.to_le_bytes());
        bytes.extend_from_slice(&(message.flags | REQUEST | ACK).to_le_bytes());
        bytes.extend_from_slice(&(at as u32 + 1).to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&message.payload);
        sys::write_all(socket.0, &bytes).map_err(|errno| (errno, at))?;
        let mut answer = [0u8; 4096];
        let n = sys::read_fd(socket.0, &mut answer).map_err(|errno| (errno, at))?;
        if n < HEADER + 4 {
            return Err((sys::EINVAL, at));
        }
        let errno = -i32::from_le_bytes([answer[16], answer[17], answer[18], answer[19]]);
        if errno != 0 && !message.ignored.contains(&(errno as u32)) {
            return Err((errno, at));
        }
    }
    Ok(())
}
