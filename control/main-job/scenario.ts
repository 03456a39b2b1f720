/** What the main job works on and runs: the machine's own images, or any image the user names. */
import { fromText, isDsecError } from '#base';
import { type BlobStore, type Image, type ImageKind, openTree } from '#imagesvc';

/** An image to convert. */
export interface Input {
  readonly source: string;
  readonly name: string;
  readonly kind: ImageKind;
}

export interface Scenario {
  /** The base first. */
  readonly inputs: readonly Input[];
  readonly workdir: string | undefined;
  /** Reads only. */
  readonly first: readonly string[];
  /** Changes files. */
  readonly change: readonly string[];
  /** Shows, in the packed image, that the changes are there. */
  readonly check: readonly string[];
  /** What `check` prints when they are. */
  readonly expected: string;
}

const BASE = 'main-job/base:1';

/** Of the layout that `makeMachineImages` writes. */
export function machineScenario(layout: string): Scenario {
  return {
    inputs: [
      { source: `oci:${layout}:base`, name: BASE, kind: 'base' },
      { source: `oci:${layout}:workspace`, name: 'main-job/workspace:1', kind: 'workspace' },
      { source: `oci:${layout}:toolkit`, name: 'main-job/toolkit:1', kind: 'toolkit' },
    ],
    workdir: '/workspace',
    first: ['node', 'count.js', 'README.md'],
    change: [
      'sh',
      '-c',
      'echo "five words in this file" > notes.txt && rm old-notes.txt && echo "More to come." >> README.md && mkdir out && node count.js notes.txt | tee out/count.txt',
    ],
    check: [
      'sh',
      '-c',
      'cat out/count.txt && node count.js notes.txt && test ! -e old-notes.txt && echo old-notes.txt is gone',
    ],
    expected: '5 words in notes.txt\n5 words in notes.txt\nold-notes.txt is gone\n',
  };
}

/** Where the static busybox of `makeTools` lies, for images without a shell. */
export const TOOLS = '/.dsec-tools';

export function sourceInput(source: string): Input {
  return { source, name: BASE, kind: 'base' };
}

export function toolsInput(layout: string): Input {
  return { source: `oci:${layout}:tools`, name: 'main-job/tools:1', kind: 'toolkit' };
}

/** `tools`: whether the image lacks a shell and gets one as a toolkit. */
export function sourceScenario(inputs: readonly Input[], tools: boolean): Scenario {
  const shell = tools ? [`${TOOLS}/busybox`, 'sh'] : ['/bin/sh'];
  return {
    inputs,
    workdir: '/',
    first: [
      ...shell,
      '-c',
      // biome-ignore lint/suspicious/noTemplateCurlyInString: the shell expands it
      'test -r /etc/os-release && . /etc/os-release; echo "hello from ${PRETTY_NAME:-this image}"',
    ],
    change: [...shell, '-c', 'echo "written in the sandbox" > /dsec-note && read line < /dsec-note && echo "$line"'],
    check: [...shell, '-c', 'read line < /dsec-note && echo "$line"'],
    expected: 'written in the sandbox\n',
  };
}

export async function hasShell(store: BlobStore, image: Image): Promise<boolean> {
  const tree = await openTree(store, image);
  try {
    return tree.stat(tree.lookup(fromText('/bin/sh'), true)).kind === 'file';
  } catch (error) {
    if (isDsecError(error)) return false;
    throw error;
  } finally {
    await tree.close();
  }
}
