// SPDX-License-Identifier: Apache-2.0
// Steps, for rank r with n_r entries after its own are coalesced:
//
//   1  all_gather  n_r and what must be alike: dtype, sparse dimensions, sizes
//   2  all_gather  the entries' indices, n_r rows of one int64 per sparse dimension
//   3  all_gather  their values, n_r rows
//   4  every rank adds up all entries, in the order of the ranks: all have the same bits
#include "lockstep/collective/c10d/backend_calls.h"

#include <numeric>

namespace lockstep::backend {
namespace {

class SparseSum {
 public:
  SparseSum(GroupRank member, Transport& transport, milliseconds timeout)
      : member_(member), transport_(transport), timeout_(timeout) {}

  Tensor of(const Tensor& tensor) {
    const Tensor mine = tensor.coalesce();
    const std::vector<int64_t> entries = entries_of_all(mine);
    const Tensor indices = all_entries(mine.indices().t().contiguous(), entries);
    const Tensor values = all_entries(mine.values().contiguous(), entries);
    return at::_sparse_coo_tensor_unsafe(indices.t(), values, mine.sizes(), mine.options()).coalesce();
  }

 private:
  // The number of each rank's entries. Ranks with different numbers of dimensions get the MismatchError of the all_gather.
  std::vector<int64_t> entries_of_all(const Tensor& mine) {
    std::vector<int64_t> header{mine._nnz(), static_cast<int64_t>(mine.scalar_type()), mine.sparse_dim()};
    header.insert(header.end(), mine.sizes().begin(), mine.sizes().end());
    const auto length = to_int64(header.size());
    const Tensor all = torch::empty({member_.size, length}, torch::kInt64);
    gather({torch::tensor(header)}, {all});
    const Tensor alike = all.narrow(1, 1, length - 1);
    for (int rank = 1; rank < member_.size; ++rank)
      if (!alike[rank].equal(alike[0]))
        throw MismatchError({.what = concat("all_reduce: the sparse tensors of ranks 0 and ", rank,
                                            " differ in dtype, shape or number of sparse dimensions"),
                             .likely = "ranks that do not make the same calls in the same order",
                             .next = "give tensors of one dtype and shape on all ranks"});
    return numbers_in<int64_t>(all.select(1, 0).contiguous());
  }

  // Rows of all ranks, in rank order; `mine` has this rank's.
  Tensor all_entries(const Tensor& mine, const std::vector<int64_t>& entries) {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes.front() = std::accumulate(entries.begin(), entries.end(), int64_t{0});
    const Tensor all = torch::empty(sizes, mine.options());
    gather({mine}, all.split_with_sizes(entries));
    return all;
  }

  void gather(const Tensors& mine, const Tensors& all) {
    const Call call{.operation = Operation::kAllGather, .timeout = timeout_};
    run_to_its_end(transport_, call_to_move(member_, call, mine, all));
  }

  GroupRank member_;
  Transport& transport_;
  milliseconds timeout_;
};

}  // namespace

std::function<void(Transport&)> sparse_all_reduce(GroupRank member, const Tensor& tensor,
                                                  const c10d::AllreduceOptions& options) {
  if (options.reduceOp.op_ != c10d::ReduceOp::SUM)
    throw UsageError({.what = "all_reduce of a sparse tensor by another reduction than SUM",
                      .next = "use SUM, or call to_dense() on the tensor first"});
  require_cpu(tensor);
  const auto timeout = options.timeout == c10d::kUnsetTimeout ? milliseconds(0) : options.timeout;
  return [member, tensor, timeout](Transport& transport) {
    const at::AutoDispatchBelowAutograd no_autograd;
    Tensor(tensor).copy_(SparseSum(member, transport, timeout).of(tensor));
  };
}

}  // namespace lockstep::backend
