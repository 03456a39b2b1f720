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
