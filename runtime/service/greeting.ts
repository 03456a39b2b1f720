/** What a client of the runtime service says of itself (runtime/agent/src/client.rs: greeting). */
import { isUtf8 } from 'node:buffer';
import { PayloadReader, PROTOCOL_VERSION } from '../backend/agent-wire.ts';

export interface Greeting {
  /** What the client's program was built from. */
  readonly build: string;
  /** The script that it would start, then its arguments. */
  readonly command: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  /** Empty when it has none any more. */
  readonly cwd: string;
  /** Which of its standard streams are terminals. */
  readonly terminals: readonly [boolean, boolean, boolean];
  /** Its standard input is /dev/null. */
  readonly inputIsNull: boolean;
  readonly terminalSize: { readonly rows: number; readonly columns: number } | undefined;
}

/** Undefined for another version, and where text is not UTF-8: a process of its own knows what to do with that. @throws RUNTIME_AGENT_PROTOCOL */
export function parseGreeting(payload: Buffer): Greeting | undefined {
  const reader = new PayloadReader(payload);
  if (reader.u32() !== PROTOCOL_VERSION) return undefined;
  const build = reader.bytes().toString();
  const command = reader.list(() => reader.bytes());
  const env = reader.list(() => reader.bytes());
  const cwd = reader.bytes();
  const bits = reader.u8();
  const [rows, columns] = [reader.u16(), reader.u16()];
  if (![...command, ...env, cwd].every((bytes) => isUtf8(bytes))) return undefined;
  return {
    build,
    command: command.map(String),
    env: variables(env.map(String)),
    cwd: cwd.toString(),
    terminals: [(bits & 1) !== 0, (bits & 2) !== 0, (bits & 4) !== 0],
    inputIsNull: (bits & 8) !== 0,
    terminalSize: rows > 0 && columns > 0 ? { rows, columns } : undefined,
  };
}

/** As Node has them: the first value of a name holds. */
function variables(entries: readonly string[]): Record<string, string> {
  const found: Record<string, string> = Object.create(null);
  for (const entry of entries) {
    const equals = entry.indexOf('=', 1);
    if (equals > 0) found[entry.slice(0, equals)] ??= entry.slice(equals + 1);
  }
  return found;
}
