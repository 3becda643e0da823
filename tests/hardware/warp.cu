// What the lanes of a warp tell each other: shuffles, votes, matches, reductions, the active mask.
#include "lanes.cuh"

#define SHUFFLE(mode)                                                                                                 \
  ROW_RR("shfl.sync." mode ".b32 %0, %1, %2, %3, -1;")                                                                \
  ROW_RR("{ .reg .pred p; shfl.sync." mode ".b32 %0|p, %1, %2, %3, -1; @!p not.b32 %0, %0; }")

LANES(shuffle, u32, u32)
  SHUFFLE("up")
  SHUFFLE("down")
  SHUFFLE("bfly")
  SHUFFLE("idx")
  ROW_RR("shfl.sync.up.b32 %0, %1, 3, 0, -1;")
  ROW_RR("shfl.sync.down.b32 %0, %1, 5, 0x1f, -1;")
  ROW_RR("shfl.sync.bfly.b32 %0, %1, 16, 0x1f, -1;")
  ROW_RR("shfl.sync.idx.b32 %0, %1, 33, 0x1f, -1;")
  ROW_RR("shfl.sync.up.b32 %0, %1, 1, 0x1800, -1;")
  ROW_RR("shfl.sync.down.b32 %0, %1, 1, 0x181f, -1;")
  ROW_RR("shfl.sync.bfly.b32 %0, %1, 4, 0x1c1f, -1;")
  ROW_RR("shfl.sync.idx.b32 %0, %1, 9, 0x181f, -1;")
END

#define VOTE(mode) ROW_RR("{ .reg .pred p; setp.lt.s32 p, %1, %2; vote.sync." mode ".pred p, p, -1;"                   \
                          " selp.b32 %0, 1, 0, p; }")

LANES(vote, u32, u32)
  VOTE("all")
  VOTE("any")
  VOTE("uni")
  ROW_RR("{ .reg .pred p; setp.lt.s32 p, %1, %2; vote.sync.ballot.b32 %0, p, -1; }")
  ROW_RR("{ .reg .pred p; setp.lt.s32 p, %1, %2; vote.sync.ballot.b32 %0, !p, -1; }")
  ROW_RR("match.any.sync.b32 %0, %1, -1;")
  ROW_RR("{ .reg .b64 t; mov.b64 t, {%1, %2}; match.any.sync.b64 %0, t, -1; }")
  ROW_RR("{ .reg .pred p; match.all.sync.b32 %0|p, %1, -1; @p or.b32 %0, %0, 1; }")
  ROW_RR("{ .reg .pred p; match.all.sync.b32 %0|p, %3, -1; @!p xor.b32 %0, %0, 1; }")
  ROW_RR("redux.sync.add.s32 %0, %1, -1;")
  ROW_RR("redux.sync.min.s32 %0, %1, -1;")
  ROW_RR("redux.sync.max.s32 %0, %1, -1;")
  ROW_RR("redux.sync.add.u32 %0, %1, -1;")
  ROW_RR("redux.sync.min.u32 %0, %1, -1;")
  ROW_RR("redux.sync.max.u32 %0, %1, -1;")
  ROW_RR("redux.sync.and.b32 %0, %1, -1;")
  ROW_RR("redux.sync.or.b32 %0, %1, -1;")
  ROW_RR("redux.sync.xor.b32 %0, %1, -1;")
  ROW_RR("mov.u32 %0, %%laneid;")
  ROW_RR("mov.u32 %0, %%lanemask_eq;")
  ROW_RR("mov.u32 %0, %%lanemask_lt;")
  ROW_RR("mov.u32 %0, %%lanemask_le;")
  ROW_RR("mov.u32 %0, %%lanemask_gt;")
  ROW_RR("mov.u32 %0, %%lanemask_ge;")
END

// Half of a warp, then a loop that lanes leave one after the other.
LANES(divergent, u32, u32)
  const u32 within = threadIdx.x % 32;
  u32 mask = 0, half = 0, sum = 0, last = 0, best = 0;
  if (within < 16) {
    asm volatile("activemask.b32 %0;" : "=r"(mask));
    asm volatile("shfl.sync.bfly.b32 %0, %1, 5, 0x1f, 0xffff;" : "=r"(half) : "r"(a));
    asm volatile("redux.sync.add.s32 %0, %1, 0xffff;" : "=r"(sum) : "r"(b));
  } else {
    asm volatile("shfl.sync.down.b32 %0, %1, 2, 0x1f, 0xffff0000;" : "=r"(half) : "r"(b));
    asm volatile("redux.sync.max.u32 %0, %1, 0xffff0000;" : "=r"(sum) : "r"(a));
  }
  for (u32 turn = 0; turn <= within / 4; ++turn) {
    const u32 staying = 0xffffffffu << (4 * turn);
    asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, %2; vote.sync.ballot.b32 %0, p, %3; }"
                 : "=r"(last) : "r"(a), "r"(c), "r"(staying));
    asm volatile("redux.sync.min.s32 %0, %1, %2;" : "=r"(best) : "r"(c), "r"(staying));
  }
  out[0] = mask, out[n] = half, out[2 * n] = sum, out[3 * n] = last, out[4 * n] = best;
END

LANES(elect, u32, u32)
  ROW_RR("{ .reg .pred p; elect.sync %0|p, -1; @p or.b32 %0, %0, 256; }")
  u32 leader = 0;
  if (threadIdx.x % 32 > 4)
    asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffe0; @p or.b32 %0, %0, 256; }" : "=r"(leader));
  *out = leader;
END
