/** How a file is written by the agent: in pieces, with flags (runtime/agent/src/files.rs). */

export const PART_BYTES = 256 << 10;

export const CREATE = 1;
export const TRUNCATE = 2;
/** It must not be there. */
export const NEW = 4;
/** No link is followed at the last name. */
export const NO_LINK = 16;
