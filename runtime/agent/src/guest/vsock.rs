//! Where a machine has no virtio-serial port (Firecracker): the link is a connection to a port of vsock, made by the host. The listener outlives a
//! snapshot, connections do not: whoever is resumed is connected to again.
//!
//! Only the host is heard. Programs of the sandbox can have no other address: what they send over vsock comes with this machine's own.

use crate::sys::{self, Fd, Result};

/// runtime/vm/firecracker/vsock.ts connects to it.
const PORT: u32 = 1024;
/// VMADDR_CID_HOST.
pub const HOST: u32 = 2;
const ANY: u32 = u32::MAX;
const AF_VSOCK: i32 = 40;
/// Of virtio.
const SOCKET_DEVICE: &[u8] = b"0x0013";

/// The machine has such a device.
pub fn is_there() -> bool {
    sys::names_in("/sys/bus/virtio/devices").iter().any(|name| {
        let path = [b"/sys/bus/virtio/devices/", &name[..], b"/device"].concat();
        sys::read_file(&path, 16).map_or(false, |kind| kind.starts_with(SOCKET_DEVICE))
    })
}

pub fn listen() -> Result<Fd> {
    let fd = sys::new_socket(AF_VSOCK, sys::SOCK_STREAM | sys::O_NONBLOCK)?;
    sys::bind_socket(fd.0, &address(ANY, PORT))?;
    sys::listen_on(fd.0, 4)?;
    Ok(fd)
}

/// A connection of `peer`; anybody else's is closed. None: nobody is there.
pub fn accept(listener: &Fd, peer: u32) -> Option<Fd> {
    let mut from = [0u8; ADDRESS];
    while let Ok(fd) = sys::accept_from(listener.0, &mut from) {
        if from[8..12] == peer.to_le_bytes() {
            return Some(fd);
        }
    }
    None
}

const ADDRESS: usize = 16;

/// A struct sockaddr_vm: family, nothing, port, machine.
fn address(machine: u32, port: u32) -> [u8; ADDRESS] {
    let mut bytes = [0u8; ADDRESS];
    bytes[..2].copy_from_slice(&(AF_VSOCK as u16).to_le_bytes());
    bytes[4..8].copy_from_slice(&port.to_le_bytes());
    bytes[8..12].copy_from_slice(&machine.to_le_bytes());
    bytes
}
