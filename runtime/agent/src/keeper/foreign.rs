//! Sandboxes that an OCI runtime starts, until they are their agents'; afterwards they are as all others.

use super::{Keeper, State};
use crate::container::{self, Failure, Stage};
use crate::oci;
use crate::sys;
use crate::wire;

impl Keeper {
    pub(super) fn start_by_runtime(&mut self, id: u32, payload: &[u8]) {
        let outcome = match (oci::parse(payload), self.kept.get_mut(&id)) {
            (Some(request), Some(kept)) if kept.state == State::Held => oci::start(&request).map(|(pid, channel)| {
                kept.pid = pid;
                kept.pid_file = request.pid_file;
                kept.channel = Some(channel);
                kept.state = State::Begun;
            }),
            _ => Err(Failure { stage: Stage::Order, errno: sys::EINVAL, what: b"order".to_vec() }),
        };
        if let Err(failure) = outcome {
            let payload = container::failure_payload(&failure);
            if let Some(kept) = self.kept.get_mut(&id) {
                kept.state = State::Failed;
                kept.failure = payload.clone();
            }
            self.tell(wire::FAILED, id, &payload);
        }
    }

    pub(super) fn has_greeted(&mut self, id: u32) {
        if let Some(kept) = self.kept.get_mut(&id) {
            kept.greeted = true;
            if kept.pid_file.is_empty() {
                kept.state = State::Running;
                let pid = kept.pid as u32;
                self.tell(wire::STARTED, id, &pid.to_le_bytes());
            }
        }
    }

    /// The runtime has ended. True: the sandbox is its agent's from now on.
    pub(super) fn is_handed_over(&mut self, id: u32, status: i32) -> bool {
        let kept = match self.kept.get_mut(&id) {
            Some(kept) if !kept.pid_file.is_empty() => kept,
            _ => return false,
        };
        let pid_file = std::mem::take(&mut kept.pid_file);
        let agent = if status == 0 { oci::agent_of(&pid_file) } else { None };
        match agent {
            Some(pid) => {
                kept.pid = pid;
                kept.is_foreign = true;
                if kept.forgotten || kept.channel.is_none() {
                    kept.kill();
                } else if kept.greeted {
                    self.has_greeted(id);
                }
                true
            }
            None => {
                let what = b"the OCI runtime".to_vec();
                kept.failure = container::failure_payload(&Failure { stage: Stage::Runtime, errno: 0, what });
                false
            }
        }
    }
}
