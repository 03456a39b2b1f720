//! What wakes the keeper: an epoll of all its descriptors, so that one sandbox that speaks costs the same beside two as beside thousands.

use crate::sys::{self, EpollEvent, Fd, Result, POLLIN};

/// Of one turn; the rest comes with the next.
const AT_ONCE: usize = 256;

#[derive(Clone, Copy)]
pub enum Source {
    Control,
    Agent(u32),
    Signals,
    Listener,
}

impl Source {
    /// In the order in which they are looked at in one turn: ends come after what was said before them, and a new connection last, which is told
    /// what there is then.
    fn token(self) -> u64 {
        match self {
            Source::Control => 0,
            Source::Agent(id) => 1 << 32 | id as u64,
            Source::Signals => 2 << 32,
            Source::Listener => 3 << 32,
        }
    }

    fn of(token: u64) -> Source {
        match token >> 32 {
            0 => Source::Control,
            1 => Source::Agent(token as u32),
            2 => Source::Signals,
            _ => Source::Listener,
        }
    }
}

pub struct Wakes {
    epoll: Fd,
    events: Vec<EpollEvent>,
}

impl Wakes {
    pub fn new(signals: &Fd, listener: &Fd) -> Result<Wakes> {
        let wakes = Wakes { epoll: sys::new_epoll()?, events: vec![EpollEvent { events: 0, token: 0 }; AT_ONCE] };
        wakes.change(signals, Source::Signals, &mut 0, POLLIN)?;
        wakes.change(listener, Source::Listener, &mut 0, POLLIN)?;
        Ok(wakes)
    }

    /// A descriptor has to be taken out (`wanted` 0) before it is closed: a child that is just being started has it too, and while it does the kernel
    /// would go on telling of it.
    pub fn change(&self, fd: &Fd, source: Source, watched: &mut i16, wanted: i16) -> Result<()> {
        if *watched != wanted {
            sys::change_watch(self.epoll.0, fd.0, source.token(), *watched, wanted)?;
            *watched = wanted;
        }
        Ok(())
    }

    /// What is ready, in order, with poll's bits.
    pub fn wait(&mut self) -> Vec<(Source, i16)> {
        let n = sys::wait_for_events(self.epoll.0, &mut self.events);
        let mut ready: Vec<(u64, u32)> = self.events[..n].iter().map(|event| (event.token, event.events)).collect();
        ready.sort_unstable();
        ready.into_iter().map(|(token, events)| (Source::of(token), events as i16)).collect()
    }
}
