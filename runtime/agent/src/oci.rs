//! Sandboxes that stay by an OCI runtime: the keeper starts the runtime, which ends once the agent runs. The agent is left to the keeper then
//! (a subreaper), as a child of its own, and its channel is descriptor 3 through all of it.

use crate::cgroup;
use crate::container::{candidates, Failure, Stage};
use crate::order::{self, Preparation};
use crate::sys::{self, c, Fd, Result};
use crate::wire::{Channel, Reader};

pub struct Request {
    pub preparation: Preparation,
    pub args: Vec<Vec<u8>>,
    /// Where the runtime writes the number of the agent.
    pub pid_file: Vec<u8>,
}

pub fn parse(payload: &[u8]) -> Option<Request> {
    let mut r = Reader::new(payload);
    let request = Request {
        preparation: order::parse_preparation(&r.bytes()?)?,
        args: r.list(|r| r.text())?,
        pid_file: r.text()?,
    };
    if r.is_at_end() && !request.args.is_empty() && !request.pid_file.is_empty() {
        Some(request)
    } else {
        None
    }
}

/// The runtime's process, and this end of what will be the agent's channel.
pub fn start(request: &Request) -> std::result::Result<(i32, Channel), Failure> {
    let _ = sys::prctl1(sys::PR_SET_CHILD_SUBREAPER, 1);
    // The groups are there before it comes: what they forbid holds for all that will be below them.
    let entries = cgroup::make(&request.preparation.cgroups)
        .map_err(|(errno, what)| Failure { stage: Stage::Cgroup, errno, what })?;
    drop(entries);
    let started = sys::socket_pair(sys::SOCK_STREAM).and_then(|(own, agents)| match sys::clone_process(0)? {
        0 => {
            sys::close_fd(own.take());
            become_runtime(&request.args, agents);
        }
        pid => Ok((pid, Channel::new(own, 1))),
    });
    started.map_err(|errno| Failure { stage: Stage::Clone, errno, what: b"the OCI runtime".to_vec() })
}

fn become_runtime(args: &[Vec<u8>], channel: Fd) -> ! {
    const PATH: &[u8] = b"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    const CHANNEL: i32 = 3;
    let prepared: Result<()> = sys::new_session().and_then(|_| {
        // Another number first: it may be 3 already, and would be closed by the exec.
        let high = sys::dup_from(channel.0, 10)?;
        // The runtime gives its standard streams to the sandbox's user: not those of the keeper, which are /dev/null and everybody's.
        let streams = sys::memfd(b"streams", 0)?;
        for number in 0..3 {
            sys::dup_to(streams.0, number)?;
        }
        sys::dup_to(high.0, CHANNEL)?;
        sys::close_range(CHANNEL as u32 + 1, u32::MAX, false);
        std::mem::forget(high);
        Ok(())
    });
    if prepared.is_ok() {
        sys::default_signals();
        sys::unblock_all_signals();
        let env = vec![PATH.to_vec()];
        let (argv, envp): (Vec<_>, Vec<_>) = (args.iter().map(|arg| c(arg)).collect(), env.iter().map(|e| c(e)).collect());
        for path in candidates(&args[0], &env) {
            sys::exec(&path, &argv, &envp);
        }
    }
    unsafe { sys::_exit(127) }
}

/// Who the agent is, once the runtime has ended well. A process of the runtime may be its parent still, for a moment. None: it has ended,
/// and its number may be another's.
pub fn agent_of(pid_file: &[u8]) -> Option<i32> {
    let text = sys::read_file(pid_file, 32).ok()?;
    let pid: i32 = std::str::from_utf8(&text).ok()?.trim().parse().ok()?;
    match sys::is_own_child(pid) || is_there(pid) {
        true => Some(pid),
        false => None,
    }
}

pub fn is_there(pid: i32) -> bool {
    pid > 0 && sys::send_signal(pid, 0).is_ok()
}
