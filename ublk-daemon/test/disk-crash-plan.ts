/** What operation `n` of a seed is, the same for the process that is killed and for the one that looks at what it left. */
import { randomNumbers } from './random-numbers.ts';

export interface Planned {
  readonly what: 'write' | 'discard' | 'flush' | 'snapshot' | 'compact';
  readonly start: number;
  readonly length: number;
}

export function plannedOperation(seed: number, operation: number, sectors: number): Planned {
  const next = randomNumbers(seed * 7919 + operation);
  for (let skip = 0; skip < 8; skip++) next();
  const dice = next();
  const what =
    dice < 0.7 ? 'write' : dice < 0.82 ? 'discard' : dice < 0.95 ? 'flush' : dice < 0.975 ? 'snapshot' : 'compact';
  const length = 1 + Math.floor(next() * 40);
  return { what, length, start: Math.floor(next() * (sectors - length)) };
}
