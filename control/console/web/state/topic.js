/** Something that others want to know of when it changes. However often it does, they hear of it once a frame. */
export class Topic {
  constructor() {
    /** @type {Set<() => void>} */
    this.listeners = new Set();
    this.waiting = false;
  }

  /** @param {() => void} listener @returns {() => void} Ends it. */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  publish() {
    if (this.waiting) return;
    this.waiting = true;
    // Not a frame's callback: those stand still in a tab that nobody sees.
    setTimeout(() => {
      this.waiting = false;
      for (const listener of this.listeners) listener();
    }, 16);
  }
}
