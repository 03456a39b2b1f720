//! The life of one task: its place is made, the host told, files taken, programs run one after the other, files given back.

use super::fetch;
use super::groups::Groups;
use super::place;
use super::step::{self, Outcome, Reason};
use super::zygote::{Fork, Zygote};
use super::{Link, Plan};
use crate::container::{At, Failure, Stage};
use crate::sys;
use crate::wire::{self, Frame, Reader};

struct Task {
    tmpfs_bytes: u64,
    steps: Vec<step::Step>,
    fetch: fetch::Wanted,
}

fn parse_task(payload: &[u8]) -> Option<Task> {
    let mut r = Reader::new(payload);
    let task = Task { tmpfs_bytes: r.u64()?, steps: r.list(step::parse)?, fetch: fetch::parse(&mut r)? };
    let sound = |one: &step::Step| !one.args.is_empty() && one.cwd.starts_with(b"/");
    if r.is_at_end() && task.steps.iter().all(sound) {
        Some(task)
    } else {
        None
    }
}

/// False: the host has gone before there was a task.
pub fn run(link: &mut Link, plan: &Plan, groups: &Groups, zygote: Option<&Zygote>) -> std::result::Result<bool, Failure> {
    let _ = sys::prctl1(sys::PR_SET_PDEATHSIG, sys::SIGKILL as u64);
    place::make(plan)?;
    let blocked = sys::sig_set(&[sys::SIGCHLD]);
    sys::block_signals(&blocked);
    let signals = sys::signal_fd(&blocked).at(Stage::Stdio, b"signals")?;
    let fork = match zygote {
        None => None,
        Some(zygote) => Some(zygote.fork(groups).at(Stage::Exec, b"a fork of the interpreter that stays")?),
    };
    link.send(wire::TASK_READY, &[]).at(Stage::Stdio, b"the host")?;
    let mut refused = None;
    loop {
        match link.receive() {
            None => return Ok(false),
            Some(Frame { kind: wire::TASK_FILE, payload, .. }) => {
                if let (None, Err(problem)) = (&refused, take_file(plan, &payload)?) {
                    refused = Some(problem);
                }
            }
            Some(Frame { kind: wire::TASK, payload, .. }) => {
                let task = parse_task(&payload).ok_or(sys::EINVAL).at(Stage::Order, b"a task")?;
                if let (Some(fork), false) = (&fork, task.steps.iter().any(|step| step.forked)) {
                    // Nobody needs it, and no program of the task is to find it.
                    fork.end().at(Stage::Exec, b"the fork that nobody wants")?;
                }
                match refused {
                    None => work(link, plan, groups, &task, signals.0, fork.as_ref())?,
                    Some((errno, path)) => refuse(link, NO_STEP, errno, &path)?,
                }
                step::end_all();
                if let Some(fork) = &fork {
                    fork.end().at(Stage::Exec, b"the fork of a task that has ended")?;
                }
                while step::wait_one(-1, 0).is_some() {}
                return Ok(true);
            }
            Some(_) => return Err(sys::EINVAL).at(Stage::Order, b"a frame that is for no task"),
        }
    }
}

fn work(
    link: &mut Link,
    plan: &Plan,
    groups: &Groups,
    task: &Task,
    signals: i32,
    fork: Option<&Fork>,
) -> std::result::Result<(), Failure> {
    place::resize(plan, task.tmpfs_bytes)?;
    let told = |done: sys::Result<()>| done.at(Stage::Stdio, b"the host");
    for (number, one) in task.steps.iter().enumerate() {
        let fork = if one.forked { fork } else { None };
        if one.forked && fork.is_none() {
            return Err(sys::EINVAL).at(Stage::Order, b"a fork of an interpreter that there is not");
        }
        // Before that, no program of the task has run: it can be given to another container.
        let begin = || if number == 0 { link.send(wire::TASK_BEGUN, &[]) } else { Ok(()) };
        match step::run(one, plan, groups, signals, fork, begin) {
            Ok(outcome) => {
                // With what comes after it: nobody can use it before.
                link.hold(wire::STEP_DONE, &done_payload(number, &outcome));
                if outcome.status != 0 || outcome.reason != Reason::None {
                    break;
                }
            }
            // A program that is not there is the task's affair; what else fails is ours.
            Err((stage, errno)) if !one.forked && stage == Stage::Exec as u8 => {
                return refuse(link, number as u8, errno, &one.args[0]);
            }
            Err((stage, errno)) => {
                return Err(Failure { stage: Stage::Task, errno, what: [&one.args[0][..], format!(" (step {})", stage).as_bytes()].concat() })
            }
        }
    }
    let problem = fetch::give(link, plan, &task.fetch);
    let mut payload = Vec::new();
    wire::put_bytes(&mut payload, problem.as_bytes());
    told(link.send(wire::TASK_END, &payload))
}

/// A file that could not be written.
const NO_STEP: u8 = 255;

fn refuse(link: &mut Link, step: u8, errno: i32, what: &[u8]) -> std::result::Result<(), Failure> {
    let mut payload = vec![step];
    payload.extend_from_slice(&errno.to_le_bytes());
    wire::put_bytes(&mut payload, what);
    link.send(wire::STEP_NOT_RUN, &payload).at(Stage::Stdio, b"the host")?;
    let mut end = Vec::new();
    wire::put_bytes(&mut end, b"");
    link.send(wire::TASK_END, &end).at(Stage::Stdio, b"the host")
}

fn done_payload(number: usize, outcome: &Outcome) -> Vec<u8> {
    let mut payload = vec![number as u8];
    payload.extend_from_slice(&outcome.status.to_le_bytes());
    payload.push(outcome.reason as u8);
    for value in [outcome.wall_us, outcome.cpu_us, outcome.peak_bytes, outcome.stdout.total, outcome.stderr.total] {
        payload.extend_from_slice(&value.to_le_bytes());
    }
    wire::put_bytes(&mut payload, &outcome.stdout.kept);
    wire::put_bytes(&mut payload, &outcome.stderr.kept);
    payload
}

/// A part of a file: path, mode, whether it goes on with what is there, bytes. As the task's user: it gets no further than that one.
fn take_file(plan: &Plan, payload: &[u8]) -> std::result::Result<std::result::Result<(), (i32, Vec<u8>)>, Failure> {
    let mut r = Reader::new(payload);
    let mut parse = || Some((r.text()?, r.u32()?, r.u8()? != 0, r.bytes()?));
    let (path, mode, more, bytes) = parse().ok_or(sys::EINVAL).at(Stage::Order, b"a file")?;
    if !path.starts_with(b"/") {
        return Err(sys::EINVAL).at(Stage::Order, b"a path of a file");
    }
    let done = fetch::as_user(plan, || {
        let mut at = 1;
        while let Some(next) = path[at..].iter().position(|byte| *byte == b'/') {
            at += next;
            match sys::make_dir(&path[..at], 0o755) {
                // A read-only root says that before it says that the folder is there.
                Ok(()) | Err(sys::EEXIST) | Err(EROFS) => {}
                Err(errno) => return Err(errno),
            }
            at += 1;
        }
        const O_TRUNC: i32 = 0o1000;
        const O_APPEND: i32 = 0o2000;
        let how = if more { O_APPEND } else { O_TRUNC };
        let file = sys::open_at(&path, sys::O_WRONLY | sys::O_CREAT | sys::O_NOFOLLOW | how, mode)?;
        sys::write_all(file.0, &bytes)
    });
    Ok(done.map_err(|errno| (errno, path)))
}

const EROFS: i32 = 30;
