//! `dsec-agent kvm`: whether /dev/kvm runs a processor. That it is there, and makes machines, proves nothing: nested, on some hosts nothing in them ever
//! moves, and the call that lets it run does not come back; whoever asks ends this process then. So a few instructions
//! are run in 64-bit mode with pages, as kernels are: POPCNT, a loop, OUT, HLT. The first is one that KVM's own emulator does not know: there are hosts where
//! all the others come from that, and no kernel ever gets far.
//!
//! Exit status 0: it ran. Else 1, with the reason on the standard output.

use crate::sys;
use std::os::raw::{c_int, c_void};

extern "C" {
    fn mmap(at: *mut c_void, bytes: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void;
}

pub fn main() -> i32 {
    let (text, status) = match run() {
        Ok(()) => ("it runs".to_string(), 0),
        Err(reason) => (reason, 1),
    };
    let _ = sys::write_all(1, format!("{}\n", text).as_bytes());
    status
}

#[cfg(not(target_arch = "x86_64"))]
fn run() -> Result<(), String> {
    Err("it is tried on x86-64 alone".to_string())
}

#[cfg(target_arch = "x86_64")]
fn run() -> Result<(), String> {
    const GET_API_VERSION: u64 = 0xae00;
    const CREATE_VM: u64 = 0xae01;
    const GET_VCPU_MMAP_SIZE: u64 = 0xae04;
    const CREATE_VCPU: u64 = 0xae41;
    const SET_TSS_ADDR: u64 = 0xae47;
    const SET_USER_MEMORY_REGION: u64 = 0x4020ae46;
    const RUN: u64 = 0xae80;
    const SET_REGS: u64 = 0x4090ae82;
    const GET_SREGS: u64 = 0x8138ae83;
    const SET_SREGS: u64 = 0x4138ae84;
    const PAGE: usize = 4096;
    const CODE: usize = 0x1000;
    const TABLES: usize = 0x2000;
    const MEMORY: usize = 0x5000;
    // mov $100000, %ecx; popcnt %ecx, %eax; loop: dec %ecx; jnz loop; out %al, $0x10; hlt
    const PROGRAM: [u8; 16] =
        [0xb9, 0xa0, 0x86, 0x01, 0x00, 0xf3, 0x0f, 0xb8, 0xc1, 0xff, 0xc9, 0x75, 0xfc, 0xe6, 0x10, 0xf4];
    const EXIT_IO: u32 = 2;
    const EXIT_HLT: u32 = 5;
    let at = |what: &'static str| move |errno: i32| format!("{}: errno {}", what, errno);

    let kvm = sys::open_at(b"/dev/kvm", sys::O_RDWR, 0).map_err(at("opening /dev/kvm"))?;
    let version = sys::ioctl_int(kvm.0, GET_API_VERSION, 0).map_err(at("asking for its version"))?;
    if version != 12 {
        return Err(format!("its interface is of version {}, not 12", version));
    }
    let machine = sys::Fd(sys::ioctl_int(kvm.0, CREATE_VM, 0).map_err(at("making a machine"))?);
    // Needed by older processors alone.
    let _ = sys::ioctl_int(machine.0, SET_TSS_ADDR, 0xfffb_d000);
    let map = |fd: i32, bytes: usize, flags: c_int| {
        let found = unsafe { mmap(std::ptr::null_mut(), bytes, 3, flags, fd, 0) };
        if found as isize == -1 {
            Err("it gives no memory".to_string())
        } else {
            Ok(found as *mut u8)
        }
    };
    let memory = map(-1, MEMORY, 0x22)?;
    unsafe {
        std::ptr::copy_nonoverlapping(PROGRAM.as_ptr(), memory.add(CODE), PROGRAM.len());
        // The first 2 MiB as they are: three tables with an entry each.
        for (number, entry) in [TABLES + 0x1003, TABLES + 0x2003, 0x83].iter().enumerate() {
            *(memory.add(TABLES + number * PAGE) as *mut u64) = *entry as u64;
        }
    }
    let mut region: [u64; 4] = [0, 0, MEMORY as u64, memory as u64];
    sys::ioctl_ptr(machine.0, SET_USER_MEMORY_REGION, &mut region).map_err(at("giving it memory"))?;
    let processor = sys::Fd(sys::ioctl_int(machine.0, CREATE_VCPU, 0).map_err(at("making a processor"))?);
    let bytes = sys::ioctl_int(kvm.0, GET_VCPU_MMAP_SIZE, 0).map_err(at("asking for its state's size"))?;
    let state = map(processor.0, (bytes as usize).max(PAGE), 1)?;

    let mut sregs = [0u8; 312];
    sys::ioctl_ptr(processor.0, GET_SREGS, &mut sregs).map_err(at("reading its registers"))?;
    const SEGMENT: usize = 24;
    for number in 0..6 {
        let segment = &mut sregs[number * SEGMENT..(number + 1) * SEGMENT];
        let is_code = number == 0;
        segment[..8].copy_from_slice(&0u64.to_le_bytes());
        segment[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        segment[12..14].copy_from_slice(&(if is_code { 8u16 } else { 16 }).to_le_bytes());
        // Kind, present, privilege, default size, system or not, long, granularity, -, usable.
        segment[14..23].copy_from_slice(&[if is_code { 11 } else { 3 }, 1, 0, !is_code as u8, 1, is_code as u8, 1, 0, 0]);
    }
    // Behind eight segments and two tables: CR0 (paging, protected), CR3, CR4 (PAE), EFER (long mode, enabled and active).
    for (place, value) in [(224, 0x8000_0011u64), (240, TABLES as u64), (248, 0x20), (264, 0x500)] {
        sregs[place..place + 8].copy_from_slice(&value.to_le_bytes());
    }
    sys::ioctl_ptr(processor.0, SET_SREGS, &mut sregs).map_err(at("setting its registers"))?;
    let mut regs = [0u64; 18];
    regs[16] = CODE as u64;
    regs[17] = 2;
    sys::ioctl_ptr(processor.0, SET_REGS, &mut regs).map_err(at("setting its registers"))?;
    for expected in [EXIT_IO, EXIT_HLT] {
        sys::ioctl_int(processor.0, RUN, 0).map_err(at("letting it run"))?;
        let exit = unsafe { *(state.add(8) as *const u32) };
        if exit != expected {
            return Err(format!("what was run ended with exit {}, not {}", exit, expected));
        }
    }
    Ok(())
}
