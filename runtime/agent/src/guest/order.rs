//! What a guest shall be, as the host says it: runtime/vm/guest-order.ts writes it.

use crate::wire::Reader;

pub struct Layer {
    /// Names of its devices: the metadata image's, then those of its data, in slot order.
    pub devices: Vec<Vec<u8>>,
    /// It is memory of the host, and read in place.
    pub dax: bool,
}

pub struct Disk {
    pub device: Vec<u8>,
    pub kind: Vec<u8>,
    pub target: Vec<u8>,
    pub data: Vec<u8>,
}

pub struct Message {
    pub kind: u16,
    pub flags: u16,
    /// Errors that are none.
    pub ignored: Vec<u32>,
    pub payload: Vec<u8>,
}

pub struct Order {
    pub modules: Vec<Vec<u8>>,
    pub hostname: Vec<u8>,
    /// Bottom first.
    pub layers: Vec<Layer>,
    /// ext4: what the sandbox changes.
    pub upper: Vec<u8>,
    /// Others, mounted in the sandbox's root.
    pub disks: Vec<Disk>,
    /// Shown in the root: path, content.
    pub files: Vec<(Vec<u8>, Vec<u8>)>,
    pub messages: Vec<Message>,
    /// Of the group that all commands are in.
    pub limits: Vec<(Vec<u8>, Vec<u8>)>,
    /// Files of the guest, before anything runs.
    pub writes: Vec<(Vec<u8>, Vec<u8>)>,
    pub clock_ns: u64,
    pub entropy: Vec<u8>,
    pub lifetime_ms: u64,
}

pub fn parse(payload: &[u8]) -> Option<Order> {
    let mut r = Reader::new(payload);
    let pair = |r: &mut Reader| Some((r.text()?, r.bytes()?));
    let order = Order {
        modules: r.list(|r| r.text())?,
        hostname: r.text()?,
        layers: r.list(|r| Some(Layer { devices: r.list(|r| r.text())?, dax: r.u8()? == 1 }))?,
        upper: r.text()?,
        disks: r.list(|r| Some(Disk { device: r.text()?, kind: r.text()?, target: r.text()?, data: r.text()? }))?,
        files: r.list(pair)?,
        messages: messages(&mut r)?,
        limits: r.list(pair)?,
        writes: r.list(pair)?,
        clock_ns: r.u64()?,
        entropy: r.bytes()?,
        lifetime_ms: r.u64()?,
    };
    let whole = r.is_at_end() && order.layers.iter().all(|layer| !layer.devices.is_empty());
    if whole {
        Some(order)
    } else {
        None
    }
}

pub fn messages(r: &mut Reader) -> Option<Vec<Message>> {
    r.list(|r| {
        Some(Message { kind: r.u16()?, flags: r.u16()?, ignored: r.list(|r| r.u32())?, payload: r.bytes()? })
    })
}
