/**
 * The guest's end of the link over vsock, for real: its first process in namespaces of its own, the kernel's vsock (its loopback), Firecracker's handshake.
 * Connections are cut in the middle of work, as a snapshot does.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import * as fs from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { findAgent, projectRoot } from '../backend/agent-binary.ts';
import { AGENT_VSOCK_PORT, connectVsock } from '../vm/firecracker/vsock.ts';
import { GuestLink } from '../vm/guest/guest-link.ts';
import { filesRead, guestWork } from '../vm/guest/guest-order.ts';
import { until } from './resident-fixture.ts';

describe('a guest with vsock alone', { timeout: 600_000 }, () => {
  const root = '/run/guest';
  const socket = '/run/vsock-bridge.sock';
  let bridge: ChildProcess;
  let guest: ChildProcess | undefined;
  let link: GuestLink | undefined;

  beforeAll(async () => {
    execFileSync('modprobe', ['vsock_loopback']);
    fs.mkdirSync(join(root, 'modules'), { recursive: true });
    fs.copyFileSync(findAgent()!.path, join(root, 'init'));
    for (const name of ['order', 'vsock-order']) fs.writeFileSync(join(root, 'modules', name), '\n');
    bridge = spawn('python3', [join(projectRoot(), 'runtime/test/vsock-bridge.py'), socket], {
      stdio: ['pipe', 'pipe', 'inherit'],
    });
    await once(bridge.stdout!, 'data');
  }, 600_000);
  afterAll(() => {
    bridge?.stdin?.end();
  });
  afterEach(async () => {
    link?.close();
    const ended = guest === undefined ? undefined : once(guest, 'exit');
    guest?.kill('SIGKILL');
    await ended;
  });

  function boot(peer: number): GuestLink {
    const words = ['--mount', '--pid', '--fork', '--kill-child', 'chroot', root, '/init', `vsock-peer=${peer}`];
    guest = spawn('unshare', words, { stdio: ['ignore', 'inherit', 'inherit'] });
    const nobody = () => {};
    link = new GuestLink(() => connectVsock(socket, AGENT_VSOCK_PORT), {
      started: nobody,
      failed: nobody,
      ended: nobody,
      frame: nobody,
      broken: (problem) => {
        throw new Error(problem);
      },
    });
    return link;
  }

  it('has every frame once and in order, however often its connections end', async () => {
    const answering = boot(1);
    const fifo = join(root, 'numbers');
    execFileSync('mkfifo', [fifo]);
    // Open for writing here too: it does not end between two writers.
    const held = fs.openSync(fifo, fs.constants.O_RDWR);
    const lines = spawn('cat', [fifo], { stdio: ['ignore', 'pipe', 'inherit'] });
    let got = '';
    lines.stdout.setEncoding('utf8').on('data', (text) => {
      got += text;
    });
    fs.writeFileSync(join(root, 'large'), Buffer.alloc(50_000, 'large '));
    const count = 300;
    const answers: Promise<Buffer>[] = [];
    for (let number = 1; number <= count; number++) {
      answers.push(answering.work(guestWork.write('/numbers', `${number}\n`), 300_000));
      answers.push(answering.work(guestWork.read(['/large']), 300_000));
      if (number % 20 === 0) {
        await answers[number];
        bridge.stdin!.write('\n');
      }
    }
    const said = await Promise.all(answers);
    expect(filesRead(said.at(-1)!, 1)[0]!.length).toBe(50_000);
    await answering.settled();
    await until('all numbers are there', () => got.split('\n').length > count);
    expect(got).toBe(Array.from({ length: count }, (_, at) => `${at + 1}\n`).join(''));
    fs.closeSync(held);
    lines.kill();
  });

  it('hears the host alone', async () => {
    const refused = boot(2);
    await expect(refused.work(guestWork.clock(), 5000)).rejects.toMatchObject({ code: 'VM_GUEST_SILENT' });
    // What its own machine connects to is closed at once; the listener stays.
    const one = await connectVsock(socket, AGENT_VSOCK_PORT);
    await once(one.resume(), 'close');
  });
});
