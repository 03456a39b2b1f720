/**
 * A stand-in for Firecracker in tests: serves its API on the socket that it is told, notes what it is asked, in which order, and keeps Firecracker's rules
 * of what may come when. No machine runs in it. `--config FILE`: JSON with `notes` (a file, a line for each request), `refuse` (a request → message),
 * `version`, `hold` (answer that request never), `vsock` (what it does with a connection: ok, silent, garbage, close).
 */
import {
  appendFileSync,
  closeSync,
  existsSync,
  openSync,
  readFileSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { createServer } from 'node:http';
import { createServer as listen } from 'node:net';
import { resolve } from 'node:path';

const words = process.argv.slice(2);
/** @param {string} name */
const option = (name) => words[words.indexOf(name) + 1] ?? '';
const config = JSON.parse(readFileSync(option('--config'), 'utf8'));
if (words.includes('--version')) {
  console.log(`Firecracker v${config.version ?? '1.15.1'}`);
  process.exit(0);
}
/** @param {object} line */
const note = (line) => appendFileSync(config.notes, `${JSON.stringify(line)}\n`);
note({ started: words.filter((word, at) => word !== '--config' && words[at - 1] !== '--config'), cwd: process.cwd() });
writeFileSync(option('--log-path'), 'Running Firecracker\n');
console.log(`console of ${option('--id')}`);

let state = 'Not started';
let memoryMiB = 128;
/** @param {string} path */
const sees = (path) => existsSync(resolve(path));
/** What Firecracker would say; undefined: done. @param {string} name @param {string} path @param {Record<string, any>} body @returns {string | undefined} */
function fault(name, path, body) {
  if (config.refuse?.[name] !== undefined) return config.refuse[name];
  if (path === '/actions' && body.action_type === 'InstanceStart') {
    if (state !== 'Not started') return 'already started';
    state = 'Running';
    return undefined;
  }
  if (path === '/vm') {
    if (state === 'Not started') return 'not supported before the start';
    state = body.state === 'Paused' ? 'Paused' : 'Running';
    return undefined;
  }
  if (path === '/snapshot/create') {
    if (state !== 'Paused') return 'it runs';
    writeFileSync(body.snapshot_path, 'state of devices');
    // One page, all else is a hole.
    writeFileSync(body.mem_file_path, '');
    truncateSync(body.mem_file_path, memoryMiB * 2 ** 20);
    const memory = openSync(body.mem_file_path, 'r+');
    writeSync(memory, Buffer.alloc(4096, body.snapshot_type), 0, 4096, body.snapshot_type === 'Diff' ? 8192 : 4096);
    closeSync(memory);
    return undefined;
  }
  if (path === '/snapshot/load') {
    for (const needed of [body.snapshot_path, body.mem_backend.backend_path]) {
      if (!sees(needed)) return `${needed} is not there`;
    }
    writeFileSync('loaded', readFileSync(body.mem_backend.backend_path).subarray(4096, 12_288));
    state = 'Paused';
    return undefined;
  }
  if (path.startsWith('/balloon')) return undefined;
  if (state !== 'Not started' && !path.startsWith('/drives')) return 'not supported after the start';
  if (path === '/machine-config') memoryMiB = body.mem_size_mib;
  for (const needed of [body.path_on_host, body.kernel_image_path, body.initrd_path]) {
    if (needed !== undefined && !sees(needed)) return `${needed} is not there`;
  }
  if (path === '/vsock') serveVsock(body.uds_path);
  return undefined;
}

/** @param {string} path */
function serveVsock(path) {
  listen((socket) => {
    socket.on('error', () => {});
    socket.once('data', (bytes) => {
      note({ vsock: bytes.toString() });
      if (config.vsock === 'close') socket.end();
      else if (config.vsock === 'garbage') socket.write('HTTP/1.1 400 Bad Request\r\n\r\n and so on and on\n');
      else if (config.vsock === 'silent') return;
      else {
        socket.write('OK 1073741824\nfrom the guest');
        socket.on('data', (more) => socket.write(more));
      }
    });
  }).listen(path);
}

createServer((request, response) => {
  /** @type {Buffer[]} */
  const parts = [];
  request.on('data', (part) => parts.push(part));
  request.on('end', () => {
    const text = Buffer.concat(parts).toString();
    const body = text === '' ? undefined : JSON.parse(text);
    const name = `${request.method} ${request.url}`;
    note({ request: name, body });
    if (config.hold === name) return;
    if (request.method === 'GET') {
      const facts = { app_name: 'Firecracker', id: option('--id'), state, vmm_version: config.version ?? '1.15.1' };
      response.setHeader('content-type', 'application/json').end(JSON.stringify(facts));
      return;
    }
    const problem = fault(name, request.url ?? '', body ?? {});
    if (body?.action_type === 'SendCtrlAltDel') {
      // The guest resets itself then.
      response.writeHead(204).end(() => {
        appendFileSync(option('--log-path'), 'Firecracker exiting successfully. exit_code=0\n');
        process.exit(0);
      });
      return;
    }
    if (problem === undefined) response.writeHead(204).end();
    else
      response.writeHead(400, { 'content-type': 'application/json' }).end(JSON.stringify({ fault_message: problem }));
  });
}).listen(option('--api-sock'));
