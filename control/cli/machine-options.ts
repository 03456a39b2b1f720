/** Options of commands that make a full machine (`--backend vm`). */
import type { Command } from 'commander';
import { FIRMWARES, FULL_VM, type MachineWish } from '#runtime';
import { fail } from '../errors.ts';
import { choice } from './choice.ts';

export interface MachineOptions {
  readonly firmware?: string;
  readonly screen?: string;
}

export function withMachineOptions(command: Command): Command {
  return command
    .option('--firmware <kind>', 'of --backend vm: bios or uefi (default: bios)')
    .option('--screen <size>', 'of --backend vm: WIDTHxHEIGHT in pixels (default: 1024x768)');
}

/** @throws CLI_USAGE */
export function machineOf(
  { firmware, screen }: MachineOptions,
  backend: string | undefined,
  program: string,
): MachineWish | undefined {
  if (firmware === undefined && screen === undefined) return undefined;
  if (backend !== FULL_VM) throw fail('CLI_USAGE', { problem: '--firmware and --screen are of --backend vm', program });
  const size = screen === undefined ? undefined : /^(\d{3,4})x(\d{3,4})$/.exec(screen);
  if (size === null) throw fail('CLI_USAGE', { problem: `--screen ${screen}: WIDTHxHEIGHT, like 1280x800`, program });
  return {
    firmware: choice('--firmware', firmware, FIRMWARES),
    width: size && Number(size[1]),
    height: size && Number(size[2]),
  };
}
