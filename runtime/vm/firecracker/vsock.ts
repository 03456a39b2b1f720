/**
 * A connection to a port of the guest, as Firecracker offers it: on its unix socket one says `CONNECT port`, and what comes after its `OK` is the
 * guest's. Nobody listening there (yet) is the end of the connection without an answer.
 *
 * A snapshot closes all of them in the guest; its listeners stay. So whoever holds one connects again after a restore.
 */
import { connect, type Socket } from 'node:net';
import { messageOf } from '#base';
import { fail } from '../../errors.ts';

/** Where the agent listens in the guest. */
export const AGENT_VSOCK_PORT = 1024;
/** All that Firecracker's machines have is one guest on a bus of its own, so any number will do. */
export const GUEST_CID = 3;
const MAX_ANSWER_BYTES = 32;
const ANSWER_MS = 20_000;

/** Bytes that come with the answer stay in the socket. Paused. @throws VM_VSOCK */
export function connectVsock(path: string, port: number, { timeoutMs = ANSWER_MS } = {}): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const socket = connect(path);
    let got = Buffer.alloc(0);
    const refuse = (problem: string) => {
      clearTimeout(timer);
      socket.destroy();
      reject(fail('VM_VSOCK', { path, port, problem }));
    };
    const timer = setTimeout(() => refuse(`no answer within ${timeoutMs / 1000} s`), timeoutMs);
    const onError = (error: Error) => refuse(messageOf(error));
    const onEnd = () => refuse('nobody listens there in the guest');
    const onData = (bytes: Buffer) => {
      got = Buffer.concat([got, bytes]);
      const end = got.indexOf(10);
      if (end === -1) {
        if (got.length > MAX_ANSWER_BYTES) refuse('its answer is no OK');
        return;
      }
      if (!/^OK \d{1,10}$/.test(got.subarray(0, end).toString('latin1'))) return refuse('its answer is no OK');
      clearTimeout(timer);
      socket.pause();
      socket.off('data', onData).off('error', onError).off('end', onEnd);
      const rest = got.subarray(end + 1);
      if (rest.length > 0) socket.unshift(rest);
      resolve(socket);
    };
    socket.on('data', onData).on('error', onError).on('end', onEnd);
    socket.once('connect', () => socket.write(`CONNECT ${port}\n`));
  });
}
