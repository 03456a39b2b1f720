/** What has a number at the agent beside commands: connections to ports and watches of files. Numbers are used once. */
import { randomInt } from 'node:crypto';
import { AGENT_FRAME, PayloadReader } from '../backend/agent-wire.ts';

export interface AgentStream {
  /** A frame of the agent about it. @throws RUNTIME_AGENT_PROTOCOL */
  onFrame(kind: number, reader: PayloadReader): void;
  /** The agent has closed it, for good: `errno`, or 0. */
  onClosed(errno: number): void;
  /** The sandbox has ended. */
  onLost(error: Error): void;
}

const KINDS: ReadonlySet<number> = new Set([
  AGENT_FRAME.connected,
  AGENT_FRAME.received,
  AGENT_FRAME.receivedEnd,
  AGENT_FRAME.sent,
  AGENT_FRAME.closed,
  AGENT_FRAME.watches,
  AGENT_FRAME.events,
]);

export class AgentStreams {
  readonly send: (kind: number, id: number, payload?: Buffer) => void;
  private readonly all = new Map<number, AgentStream>();
  private next = randomInt(1, 2 ** 30);
  private gone: Error | undefined;

  constructor(send: (kind: number, id: number, payload?: Buffer) => void) {
    this.send = send;
  }

  get size(): number {
    return this.all.size;
  }

  /** @throws what the sandbox ended with */
  add(stream: AgentStream): number {
    if (this.gone !== undefined) throw this.gone;
    const id = this.next++;
    this.all.set(id, stream);
    return id;
  }

  /** Nothing more is wanted of it. */
  close(id: number): void {
    if (this.all.delete(id)) this.send(AGENT_FRAME.close, id);
  }

  /** Of those before this process nobody knows. */
  closeUnknown(): void {
    if (this.all.size === 0) this.send(AGENT_FRAME.close, 0);
  }

  /** False: a frame about something else. */
  receive(kind: number, id: number, payload: Buffer): boolean {
    if (!KINDS.has(kind)) return false;
    const stream = this.all.get(id);
    const reader = new PayloadReader(payload);
    if (kind !== AGENT_FRAME.closed) stream?.onFrame(kind, reader);
    else {
      const errno = reader.i32();
      this.all.delete(id);
      stream?.onClosed(errno);
    }
    return true;
  }

  lose(error: Error): void {
    this.gone = error;
    for (const stream of [...this.all.values()]) stream.onLost(error);
    this.all.clear();
  }
}
