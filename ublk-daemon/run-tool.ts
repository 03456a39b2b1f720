/** Programs of the system that make and convert disks: found where root has them, named with their package where they are missing. */
import { spawn } from 'node:child_process';
import { systemCode } from '#base';
import { fail } from './errors.ts';

export function runTool(tool: string, aptPackage: string, args: string[], signal?: AbortSignal): Promise<void> {
  const path = `${process.env.PATH ?? ''}:/usr/sbin:/sbin`;
  return new Promise((done, refuse) => {
    const env = { ...process.env, PATH: path };
    const child = spawn(tool, args, { stdio: ['ignore', 'ignore', 'pipe'], env, signal });
    let errors = '';
    child.stderr.on('data', (chunk: Buffer) => {
      errors = (errors + chunk).slice(-2000);
    });
    child.on('error', (error) => {
      // It has been told to end: what it writes is its own until it has.
      if (signal?.aborted) return;
      refuse(systemCode(error) === 'ENOENT' ? fail('DISK_TOOL_MISSING', { tool, package: aptPackage }, error) : error);
    });
    child.once('close', (status) => {
      if (signal?.aborted) refuse(signal.reason);
      else if (status === 0) done();
      else refuse(fail('DISK_IMPORT_FAILED', { tool, problem: errors.trim() || `exit status ${status}` }));
    });
  });
}
