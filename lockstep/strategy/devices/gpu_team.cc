// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/gpu_team.h"

#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/sampler.h"

namespace lockstep {
namespace {

torch::Tensor part_of_flat(const torch::Tensor& flat, const Range& part) { return flat.slice(0, part.begin, part.end); }

}  // namespace

torch::Tensor brought_to(torch::Device gpu, const torch::Tensor& tensor) {
  if (tensor.device() == gpu) return tensor;
  if (tensor.is_cpu() || tensor.layout() != torch::kStrided) return tensor.to(gpu);
  torch::Tensor copy = torch::empty_like(tensor, tensor.options().device(gpu));
  copy_between(copy, tensor);
  return copy;
}

const torch::Tensor& GpuTeam::of(int rank) const { return table_[to_size((rank + size()) % size())]; }

// The first wait compares what the devices want; the last one lets them go on when nobody reads their tensor any more.
template <class Work>
void GpuTeam::together(Call call, const torch::Tensor& flat, const Work& work) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor mine = flat.detach();
  table_[to_size(rank())] = mine;
  call.count = to_size(mine.numel());
  call.dtype = *to_dtype(mine.scalar_type());
  const Signature wanted = signature_of(call);
  group_.run({.operation = Operation::kBarrier}, &wanted);
  work(mine);
  group_.barrier();
  table_[to_size(rank())] = torch::Tensor();
}

void GpuTeam::all_reduce(const torch::Tensor& flat, Algorithm algorithm) {
  together({.operation = Operation::kAllReduce, .algorithm = algorithm}, flat, [&](const torch::Tensor& mine) {
    switch (algorithm) {
      case Algorithm::kCentral: return all_reduce_central(mine);
      case Algorithm::kRing: return all_reduce_ring(mine);
      case Algorithm::kTree: return all_reduce_tree(mine);
      default: return all_reduce_direct(mine);
    }
  });
}

void GpuTeam::reduce(const torch::Tensor& flat, int root) {
  together({.operation = Operation::kReduce, .root = root}, flat, [&](const torch::Tensor& mine) {
    if (rank() == root) sum_of_all(mine, 0, mine.numel());
  });
}

void GpuTeam::broadcast(const torch::Tensor& flat, int root) {
  together({.operation = Operation::kBroadcast, .root = root}, flat, [&](const torch::Tensor& mine) {
    if (rank() != root) copy_between(mine, of(root));
  });
}

// Elements [begin, end) of `mine` = their sum over all devices, in the order of the devices.
void GpuTeam::sum_of_all(const torch::Tensor& mine, std::int64_t begin, std::int64_t end) {
  torch::Tensor sum = brought_to(mine.device(), of(0).slice(0, begin, end)).clone();
  for (int i = 1; i < size(); ++i) sum.add_(brought_to(mine.device(), of(i).slice(0, begin, end)));
  mine.slice(0, begin, end).copy_(sum);
}

// Device 0 sums, the others copy.
void GpuTeam::all_reduce_central(const torch::Tensor& mine) {
  if (rank() == 0) sum_of_all(mine, 0, mine.numel());
  group_.barrier();
  if (rank() != 0) copy_between(mine, of(0));
}

// Device r sums part r, then copies every other part from the device that has summed it. Nobody else reads part r of r's
// tensor before the wait, and nobody writes it after.
void GpuTeam::all_reduce_direct(const torch::Tensor& mine) {
  const auto part = [&](int i) { return even_part(mine.numel(), i, size()); };
  sum_of_all(mine, part(rank()).begin, part(rank()).end);
  group_.barrier();
  for (int step = 1; step < size(); ++step) {
    const int from = (rank() + step) % size();
    copy_between(part_of_flat(mine, part(from)), part_of_flat(of(from), part(from)));
  }
}

// The tensor in p parts. Step s of p-1: device r adds part r-1-s of its left neighbour to its own; afterwards it has the
// whole sum of part r+1. Step s of p-1 more: it copies part r-s from the left.
void GpuTeam::all_reduce_ring(const torch::Tensor& mine) {
  const auto part = [&](int i) { return even_part(mine.numel(), ((i % size()) + size()) % size(), size()); };
  for (int step = 0; step + 1 < size(); ++step) {
    const Range range = part(rank() - 1 - step);
    part_of_flat(mine, range).add_(brought_to(mine.device(), part_of_flat(of(rank() - 1), range)));
    group_.barrier();
  }
  for (int step = 0; step + 1 < size(); ++step) {
    const Range range = part(rank() - step);
    copy_between(part_of_flat(mine, range), part_of_flat(of(rank() - 1), range));
    group_.barrier();
  }
}

// Up: at distance d = 1, 2, 4, ... each second device of those left adds the one d behind it. Down: the same backwards,
// with copies.
void GpuTeam::all_reduce_tree(const torch::Tensor& mine) {
  int distance = 1;
  for (; distance < size(); distance *= 2) {
    if (rank() % (2 * distance) == 0 && rank() + distance < size())
      mine.add_(brought_to(mine.device(), of(rank() + distance)));
    group_.barrier();
  }
  for (distance /= 2; distance > 0; distance /= 2) {
    if (rank() % (2 * distance) == distance) copy_between(mine, of(rank() - distance));
    group_.barrier();
  }
}

}  // namespace lockstep
