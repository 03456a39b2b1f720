/** The edges that a watcher is told of: `ID=URL` on the command line, and a file with a line `ID URL` for each, which can be read again. */
import { readFileSync } from 'node:fs';
import { messageOf } from '#base';
import { checkEdgeId } from '../edge/edge-state.ts';
import { fail } from '../errors.ts';
import type { EdgeId } from '../placement/node-report.ts';
import { parsePeerUrl } from '../service-base/peer-client.ts';

/** @throws WATCHER_EDGE */
export function parseEdgeOption(text: string): readonly [EdgeId, string] {
  const at = text.indexOf('=');
  return checked(at < 0 ? '' : text.slice(0, at), text.slice(at + 1), `--edge ${text}`);
}

/** @throws WATCHER_EDGE, WATCHER_EDGES_FILE */
export function readEdgesFile(file: string): Map<EdgeId, string> {
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    throw fail('WATCHER_EDGES_FILE', { file, problem: messageOf(error) }, error);
  }
  const edges = new Map<EdgeId, string>();
  text.split('\n').forEach((line, k) => {
    const words = line.trim().split(/\s+/);
    if (words[0] === '' || words[0]!.startsWith('#')) return;
    const [edge, url] = checked(words[0]!, words.slice(1).join(' '), `${file}:${k + 1}`);
    if (edges.has(edge)) throw fail('WATCHER_EDGE', { what: `${file}:${k + 1}`, problem: `${edge} was there before` });
    edges.set(edge, url);
  });
  return edges;
}

function checked(edge: string, url: string, what: string): readonly [EdgeId, string] {
  try {
    parsePeerUrl(url);
    return [checkEdgeId(edge), url];
  } catch (error) {
    throw fail('WATCHER_EDGE', { what, problem: messageOf(error) }, error);
  }
}
