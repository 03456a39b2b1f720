/** The frames of a socket to an agent's program, for whoever asks it and is told by it. */
import type { Duplex } from 'node:stream';
import { messageOf } from '#base';
import type { Frame, FrameParser } from './agent-wire.ts';

/**
 * Gives each frame to `receive`; one that cannot be, or that `receive` throws at, ends the socket. `closed` is called once, with the reason.
 * @param parser with what has come before
 */
export function readFrames(
  socket: Duplex,
  parser: FrameParser,
  receive: (frame: Frame) => void,
  closed: (problem: string) => void,
): void {
  socket.on('data', (bytes: Buffer) => {
    try {
      for (const frame of parser.push(bytes)) receive(frame);
    } catch (error) {
      socket.destroy(error instanceof Error ? error : new Error(messageOf(error)));
    }
  });
  let problem = 'it has ended';
  socket.on('error', (error) => {
    problem = messageOf(error);
  });
  // Its end closes; there is nothing half open here.
  socket.on('end', () => socket.destroy());
  socket.once('close', () => closed(problem));
}

/** Writes at the end of this turn, all of it at once: each write is a call of the kernel's, and wakes who reads. */
export function turnWriter(socket: Duplex): (bytes: Buffer) => void {
  let isCorked = false;
  return (bytes) => {
    if (!isCorked) {
      isCorked = true;
      socket.cork();
      process.nextTick(() => {
        isCorked = false;
        socket.uncork();
      });
    }
    socket.write(bytes);
  };
}
