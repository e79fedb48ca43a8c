// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/gpu_team.h"

#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {

Tensor brought_to(torch::Device gpu, const Tensor& tensor) {
  if (tensor.device() == gpu) return tensor;
  if (tensor.is_cpu() || tensor.layout() != torch::kStrided) return tensor.to(gpu);
  Tensor copy = torch::empty_like(tensor, tensor.options().device(gpu));
  copy_between(copy, tensor);
  return copy;
}

namespace {

class GpuTeam {
 public:
  GpuTeam(shm::Group& group, const Tensors& table) : group_(group), table_(table) {}

  void run(const Call& call, const Tensor& mine) {
    if (call.operation == Operation::kAllReduce) return all_reduce(call.algorithm, mine);
    const bool is_root = rank() == call.root;
    if (call.operation == Operation::kReduce && is_root) sum_of_all(mine, 0, 1);
    if (call.operation == Operation::kBroadcast && !is_root) copy_between(mine, of(call.root));
  }

 private:
  void all_reduce(Algorithm algorithm, const Tensor& mine) {
    switch (algorithm) {
      case Algorithm::kCentral: return all_reduce_central(mine);
      case Algorithm::kRing: return all_reduce_ring(mine);
      case Algorithm::kTree: return all_reduce_tree(mine);
      default: return all_reduce_direct(mine);
    }
  }

  // Part `index` of `mine` = the sum of these parts of all devices, in the order of the devices.
  void sum_of_all(const Tensor& mine, int index, int parts) {
    Tensor sum = brought_to(mine.device(), part_of(of(0), index, parts)).clone();
    for (int i = 1; i < size(); ++i) sum.add_(brought_to(mine.device(), part_of(of(i), index, parts)));
    part_of(mine, index, parts).copy_(sum);
  }

  // Device 0 sums, the others copy.
  void all_reduce_central(const Tensor& mine) {
    if (rank() == 0) sum_of_all(mine, 0, 1);
    group_.barrier();
    if (rank() != 0) copy_between(mine, of(0));
  }

  // Device r sums part r, then copies every other part from the device that has summed it. Nobody else reads part r of
  // r's tensor before the wait, and nobody writes it after.
  void all_reduce_direct(const Tensor& mine) {
    sum_of_all(mine, rank(), size());
    group_.barrier();
    for (int step = 1; step < size(); ++step) {
      const int from = (rank() + step) % size();
      copy_between(part_of(mine, from, size()), part_of(of(from), from, size()));
    }
  }

  // The tensor in p parts. Step s of p-1: device r adds part r-1-s of its left neighbour to its own; afterwards it has
  // the whole sum of part r+1. Step s of p-1 more: it copies part r-s from the left.
  void all_reduce_ring(const Tensor& mine) {
    const auto part = [&](const Tensor& flat, int i) { return part_of(flat, (i + size()) % size(), size()); };
    const Tensor& left = of(rank() - 1);
    for (int step = 0; step + 1 < size(); ++step) {
      const int i = rank() - 1 - step;
      part(mine, i).add_(brought_to(mine.device(), part(left, i)));
      group_.barrier();
    }
    for (int step = 0; step + 1 < size(); ++step) {
      copy_between(part(mine, rank() - step), part(left, rank() - step));
      group_.barrier();
    }
  }

  // Goes up: at distance d = 1, 2, 4, ... each second device of those left adds the one d behind it. Then goes the same
  // way back, with copies.
  void all_reduce_tree(const Tensor& mine) {
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

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  const Tensor& of(int rank) const { return table_[to_size((rank + size()) % size())]; }

  shm::Group& group_;
  const Tensors& table_;
};

}  // namespace

// The first wait compares what the devices want; the last one lets them go on when nobody reads their tensor any more.
void run_between_gpus(shm::Group& group, Tensors& table, const Call& call, const Tensor& flat) {
  const torch::NoGradGuard no_grad;
  Tensor& mine = table[to_size(group.rank())];
  mine = flat.detach();
  const Signature wanted = signature_of(call);
  group.run({.operation = Operation::kBarrier}, &wanted);
  GpuTeam(group, table).run(call, flat.detach());
  group.barrier();
  mine = Tensor();
}

}  // namespace lockstep
