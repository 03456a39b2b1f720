/** What a full virtual machine is made of, beside its disk: as asked for, and as it is on record. */
export const FIRMWARES = ['bios', 'uefi'] as const;
export type Firmware = (typeof FIRMWARES)[number];

export interface MachineWish {
  /** `bios` by default. */
  readonly firmware?: Firmware;
  /** Of its screen; 1024 x 768 by default. */
  readonly width?: number;
  readonly height?: number;
}

export interface MachineFacts {
  readonly firmware: Firmware;
  readonly width: number;
  readonly height: number;
  readonly cpus: number;
  readonly memoryBytes: number;
  /** It has run: what made it has not failed half way. */
  readonly ready?: boolean;
  /** It has a port for a guest agent (guest-agent.ts); those that were made before there was one have none. */
  readonly agentPort?: true;
  /** It has a port for the clipboard (guest-clipboard.ts), after that one; those that were made before there was one have none. */
  readonly clipboardPort?: true;
  /** It has a generation id, by which its system knows that it is another machine; those that were made before there was one have none. */
  readonly generationId?: true;
  /** Number of the network whose hardware address its card has; undefined: its own. A fork with memory has that of whoever was forked first. */
  readonly cardOf?: number;
  /** How often it was paused: names the folder of its last state. */
  readonly state?: number;
}

export const SCREEN = { width: 1024, height: 768, least: 320, most: 4096 };
/** Where it is found by `connect`, as if something listened there. */
export const VNC_PORT = 5900;
