//! dsec-agent: the small static program of a node.
//!
//!     dsec-agent launch [SOCKET]                    starts sandboxes that Node orders over descriptor 3; see launcher.rs
//!     dsec-agent keep SOCKET                        the same for sandboxes that outlive Node; see keeper.rs
//!     dsec-agent agent FD LIFETIME                  the first process of such a sandbox; see aether.rs
//!     dsec-agent task DIRS                          the first process of a container for FnCall tasks; see task.rs
//!     dsec-agent client SOCKET NODE SCRIPT ARG...   `dsec run` through the resident service; see client.rs
//!     dsec-agent kvm                                whether /dev/kvm runs a processor; see kvm.rs
//!     /init                                         the first process of a virtual machine; see guest.rs
//!     dsec-agent version                            the version of its protocol, and what it was built from
//!
//! Without the standard library's own start: nothing of it is needed, and it costs as much time as all the rest.
#![no_main]

mod aether;
mod cgroup;
mod client;
mod container;
mod exec;
mod fill;
mod files;
mod guest;
mod keeper;
mod kvm;
mod landlock;
mod launcher;
mod oci;
mod order;
mod ports;
mod selfcopy;
mod sys;
mod task;
mod terminal;
mod thaw;
mod userns;
mod watches;
mod wire;

use std::os::raw::{c_char, c_int};

/// Hash of the sources, set by scripts/agent-build.mjs.
pub const BUILD: &str = match option_env!("DSEC_AGENT_BUILD") {
    Some(build) => build,
    None => "unstamped",
};

#[no_mangle]
pub extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let args: Vec<Vec<u8>> = (0..argc as usize)
        .map(|i| unsafe { std::ffi::CStr::from_ptr(*argv.add(i)) }.to_bytes().to_vec())
        .collect();
    if guest::is_first_process(&args) {
        return guest::main(&args);
    }
    match args.get(1).map(|name| &name[..]) {
        Some(b"launch") => launcher::main(&args),
        Some(b"keep") if args.len() == 3 => keeper::main(&args),
        Some(b"agent") if args.len() == 4 => aether::main(&args),
        Some(b"task") if args.len() == 3 => task::main(&args),
        Some(b"client") if args.len() >= 5 => client::main(&args[2], &args[3], &args[4..]),
        Some(b"kvm") => kvm::main(),
        Some(b"version") => {
            let _ = sys::write_all(1, format!("{} {}\n", wire::VERSION, BUILD).as_bytes());
            0
        }
        _ => {
            let _ = sys::write_all(2, b"dsec-agent: it is started by dsec\n");
            2
        }
    }
}
