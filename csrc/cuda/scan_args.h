// What the host hands to the CUDA kernels, by value, and the constants that both must agree on.
#pragma once

#include "../float_format.h"
#include "../row.h"

namespace nanscan::cuda {

constexpr int kThreads = 256;  // a block
constexpr int kLoads = 4;      // loads of 16 bytes in flight a thread
// Blocks that fit a multiprocessor at a time: 48 and 80 registers a thread.
constexpr int kFlatBlocksPerSm = 5;
constexpr int kOtherBlocksPerSm = 3;
constexpr int kLoadBytes = 16;
constexpr int kTileBytes = kThreads * kLoads * kLoadBytes;  // a block's share of one round

constexpr int kMaxOuter = 64;
constexpr int kManyTensors = 96;  // fills, with the dimensions, the 4 KB that any driver takes
constexpr int kManyDims = 40;

struct WalkDim {
  uint64_t size;
  int64_t stride;  // in elements
};

// How the walk order (memory order, slowest first) maps to the row-major index of an element.
struct IndexDim {
  uint64_t size;
  uint64_t weight;  // what one step adds to the row-major index
};

// Row-major order in flat memory. The address is a multiple of the element's size.
struct FlatScan {
  const void* data;
  uint64_t count;  // elements, at least 1
  Row* row;
  uint32_t* tickets;  // the last ticket taken on this device
  uint32_t mirrored;  // the row has a mirror
};

// Runs of `run` elements, `run_stride` apart, at the odometer of `outer`. A unit of work is a piece
// of a run: `lanes` threads with kLoads loads each, of single elements or, with `vectors`, of 16
// bytes; the end of a run that is less than that counts as one. With `vectors`, every run begins at
// a multiple of 16 bytes and is flat.
struct StridedScan {
  const void* data;
  uint64_t run;
  int64_t run_stride;
  uint64_t pieces;  // of a run
  uint64_t units;   // in all
  uint64_t repeat;  // logical elements that each stored one stands for
  uint64_t elements;
  Row* row;
  uint32_t* tickets;
  uint32_t mirrored;
  uint32_t lanes;  // a power of two, at most 32
  uint32_t vectors;
  uint32_t outer_count;
  uint32_t index_count;  // 0: walk order is row-major order
  WalkDim outer[kMaxOuter];
  IndexDim index[kMaxOuter + 1];
};

struct ManyEntry {
  const void* data;
  uint64_t count;
  Row* row;
  uint32_t first_block;  // its blocks end where the next entry's begin
  DType dtype;
  uint8_t index_count;
  uint16_t index_begin;
};

// Flat tensors, in any order of their dimensions, one after another over the grid.
struct ManyScan {
  uint32_t tensors;
  uint32_t blocks;
  uint32_t mirrored;  // every row has a mirror
  uint32_t* tickets;
  ManyEntry entry[kManyTensors];
  IndexDim index[kManyDims];
};
static_assert(sizeof(ManyScan) <= 4096 && sizeof(StridedScan) <= 4096,
              "kernel arguments of any driver");

}  // namespace nanscan::cuda
