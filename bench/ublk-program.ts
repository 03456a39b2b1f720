/**
 * The least that a ublk server in C can be, for ublk-loop.bench.ts: what the driver itself allows on the machine at hand. One queue, one ring, the
 * caller's bytes straight from and to the mapped file (USER_COPY), or through buffers with pread and pwrite (`buffers`).
 */
import { spawnSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';

const UBLK_SERVER_C = `
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#define CONTROL(n) (0xc0207500u | (n))
#define QUEUE(n) (0xc0107500u | (n))
#define DEPTH 64
#define MOST (1 << 20)
struct ring { int fd; unsigned *sqh, *sqt, *cqh, *cqt, sqm, cqm, words; uint32_t *sqes; struct io_uring_cqe *cqes; };
static void open_ring(struct ring *r, unsigned entries, unsigned flags) {
  struct io_uring_params p; memset(&p, 0, sizeof p); p.flags = flags;
  if ((r->fd = syscall(425, entries, &p)) < 0) exit(2);
  size_t n = p.cq_off.cqes + p.cq_entries * 16, m = p.sq_off.array + p.sq_entries * 4;
  char *b = mmap(0, n > m ? n : m, 3, MAP_SHARED | MAP_POPULATE, r->fd, 0);
  r->words = flags & (1 << 10) ? 32 : 16;
  r->sqes = mmap(0, p.sq_entries * r->words * 4, 3, MAP_SHARED | MAP_POPULATE, r->fd, 0x10000000);
  r->sqh = (void *)(b + p.sq_off.head); r->sqt = (void *)(b + p.sq_off.tail); r->sqm = *(unsigned *)(b + p.sq_off.ring_mask);
  r->cqh = (void *)(b + p.cq_off.head); r->cqt = (void *)(b + p.cq_off.tail); r->cqm = *(unsigned *)(b + p.cq_off.ring_mask);
  r->cqes = (void *)(b + p.cq_off.cqes);
  unsigned *a = (void *)(b + p.sq_off.array); for (unsigned i = 0; i < p.sq_entries; i++) a[i] = i;
}
static uint32_t *prepare(struct ring *r, int fd, uint32_t data) {
  unsigned t = *r->sqt; uint32_t *s = r->sqes + (t & r->sqm) * r->words; memset(s, 0, r->words * 4);
  s[0] = 46; s[1] = fd; s[8] = data; __atomic_store_n(r->sqt, t + 1, __ATOMIC_RELEASE); return s;
}
static int enter(struct ring *r, unsigned wait) {
  return syscall(426, r->fd, *r->sqt - __atomic_load_n(r->sqh, __ATOMIC_ACQUIRE), wait, 1, 0, 0);
}
static struct ring control; static int control_fd, id = -1;
static void command(unsigned number, void *at, int length, uint64_t data) {
  uint32_t *s = prepare(&control, control_fd, 1); s[2] = CONTROL(number); s[12] = id; s[13] = (length << 16) | 0xffff;
  *(uint64_t *)(s + 14) = (uintptr_t)at; *(uint64_t *)(s + 16) = data;
  while (*control.cqh == __atomic_load_n(control.cqt, __ATOMIC_ACQUIRE)) enter(&control, 1);
  int result = control.cqes[*control.cqh & control.cqm].res; ++*control.cqh;
  if (result < 0) { fprintf(stderr, "command %u: %s\\n", number, strerror(-result)); exit(3); }
}
static int file, device, copies; static char *map, *buffers; static volatile int ready;
struct request { uint32_t operation, sectors; uint64_t start, address; };
static void answer(struct ring *r, unsigned number, int tag, int result) {
  uint32_t *s = prepare(r, device, tag); s[2] = QUEUE(number); s[12] = tag << 16; s[13] = result;
  *(uint64_t *)(s + 14) = copies ? 0 : (uintptr_t)(buffers + (size_t)tag * MOST);
}
static void *serve(void *none) {
  struct __user_cap_header_struct head = { 0x20080522, 0 }; struct __user_cap_data_struct caps[2];
  syscall(SYS_capget, &head, caps); caps[0].effective &= ~(1u << 21); syscall(SYS_capset, &head, caps); /* no partition scan */
  struct ring r; open_ring(&r, DEPTH * 2, (1 << 12) | (1 << 13));
  struct request *requests = mmap(0, 4096, PROT_READ, MAP_SHARED | MAP_POPULATE, device, 0);
  for (int i = 0; i < DEPTH; i++) answer(&r, 0x20, i, -1);
  enter(&r, 0); ready = 1;
  for (int live = DEPTH; live;) {
    if (enter(&r, 1) < 0 && errno != EINTR) exit(4);
    while (*r.cqh != __atomic_load_n(r.cqt, __ATOMIC_ACQUIRE)) {
      struct io_uring_cqe *c = &r.cqes[*r.cqh & r.cqm]; int tag = c->user_data, failed = c->res < 0;
      __atomic_store_n(r.cqh, *r.cqh + 1, __ATOMIC_RELEASE);
      if (failed) { live--; continue; }
      struct request *q = &requests[tag]; int operation = q->operation & 255; ssize_t length = (ssize_t)q->sectors << 9, done = length;
      off_t at = q->start << 9, place = 0x80000000ull + ((uint64_t)tag << 25); char *buffer = buffers + (size_t)tag * MOST;
      if (operation == 0) done = copies ? pwrite(device, map + at, length, place) : pread(file, buffer, length, at);
      else if (operation == 1) done = copies ? pread(device, map + at, length, place) : pwrite(file, buffer, length, at);
      else if (operation == 2) done = fdatasync(file);
      else done = -1;
      answer(&r, 0x21, tag, done < 0 ? -EIO : done);
    }
  }
  munmap(requests, 4096); close(r.fd); return none;
}
int main(int argc, char **argv) { /* server FILE copies|buffers: says its device, serves it until SIGTERM */
  struct stat st; file = open(argv[1], O_RDWR); if (file < 0 || fstat(file, &st) || argc < 3) return 1;
  copies = !strcmp(argv[2], "copies"); map = mmap(0, st.st_size, 3, MAP_SHARED, file, 0);
  buffers = mmap(0, (size_t)DEPTH * MOST, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if ((control_fd = open("/dev/ublk-control", O_RDWR)) < 0) return 1;
  open_ring(&control, 4, 1 << 10);
  uint32_t info[16] = { 1 | DEPTH << 16, 0, MOST, -1, getpid(), 0, (1 << 6) | (copies ? 1 << 7 : 0) };
  command(4, info, 64, 0); id = info[3];
  uint32_t disk[16] = { 64, 1, 4, 0x090c0c09, MOST >> 9, 0, st.st_size >> 9, st.st_size >> 41 };
  command(8, disk, 64, 0);
  char path[64]; sprintf(path, "/dev/ublkc%d", id);
  while ((device = open(path, O_RDWR)) < 0) usleep(5000);
  sigset_t ending; sigemptyset(&ending); sigaddset(&ending, SIGTERM); pthread_sigmask(SIG_BLOCK, &ending, 0);
  pthread_t thread; pthread_create(&thread, 0, serve, 0); while (!ready) usleep(1000);
  command(6, 0, 0, getpid());
  printf("/dev/ublkb%d\\n", id); fflush(stdout);
  int signal; sigwait(&ending, &signal);
  command(7, 0, 0, 0); pthread_join(thread, 0); close(device); command(5, 0, 0, 0); return 0;
}
`;

/** Its path; undefined where there is nothing to build it with. */
export function buildUblkServer(folder: string): string | undefined {
  const source = join(folder, 'ublk-server.c');
  const program = join(folder, 'ublk-server');
  writeFileSync(source, UBLK_SERVER_C);
  return spawnSync('gcc', ['-O2', '-pthread', source, '-o', program]).status === 0 ? program : undefined;
}
