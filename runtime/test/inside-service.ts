/** Services that listen inside a sandbox's network: a Node program of this machine, moved into its network namespace. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { processesOf } from './resident-fixture.ts';

export class InsideService {
  readonly port: number;
  private readonly child: ChildProcess;
  private readonly lines: readonly string[];

  private constructor(child: ChildProcess, port: number, lines: readonly string[]) {
    this.child = child;
    this.port = port;
    this.lines = lines;
  }

  /** `script` has `net`, `http`, `say` (a line for `told`), and makes `server`. It listens at `address`. */
  static async start(sandbox: NodeSandbox, script: string, address = '127.0.0.1'): Promise<InsideService> {
    const program = [
      "const net = require('node:net'), http = require('node:http');",
      'const say = (text) => process.stdout.write(text + "\\n");',
      script,
      `server.listen({ port: 0, host: '${address}', backlog: 200 }, () => say(server.address().port));`,
      // With whoever started it.
      "process.stdin.resume().on('end', () => process.exit());",
    ].join('\n');
    const pid = processesOf(sandbox)[0]!;
    const child = spawn('nsenter', [`--net=/proc/${pid}/ns/net`, process.execPath, '-e', program], {
      stdio: ['pipe', 'pipe', 'inherit'],
    });
    const lines: string[] = [];
    child.stdout!.on('data', (bytes: Buffer) => lines.push(...String(bytes).trim().split('\n')));
    const isPort = (line: string) => /^\d+$/.test(line);
    while (!lines.some(isPort)) await once(child.stdout!, 'data');
    const service = new InsideService(child, Number(lines.find(isPort)), lines);
    return service;
  }

  get told(): readonly string[] {
    return this.lines;
  }

  async stop(): Promise<void> {
    if (this.child.exitCode !== null || this.child.signalCode !== null) return;
    const gone = once(this.child, 'exit');
    this.child.kill('SIGKILL');
    await gone;
  }
}

/** Writes back what comes, and ends when that does. */
export const ECHO = `
  const server = net.createServer({ allowHalfOpen: true }, (socket) => {
    socket.on('error', () => {});
    socket.on('close', () => say('closed'));
    socket.pipe(socket);
  });`;
