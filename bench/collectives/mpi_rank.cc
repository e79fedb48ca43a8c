// SPDX-License-Identifier: Apache-2.0
// MPI, as one of the systems: compiled by each MPI's own compiler, started by its mpirun with the address of the
// benchmark.
#include <mpi.h>

#include <map>
#include <vector>

#include "bench/collectives/cases.h"

namespace lockstep::bench {
namespace {

const MPI_Comm kWorld = MPI_COMM_WORLD;

MPI_Datatype type_of(const std::string& dtype) {
  static const std::map<std::string, MPI_Datatype> types{{"float32", MPI_FLOAT},
                                                         {"float64", MPI_DOUBLE},
                                                         {"int32", MPI_INT32_T},
                                                         {"int64", MPI_INT64_T},
                                                         {"uint8", MPI_UINT8_T}};
  const auto found = types.find(dtype);
  return found == types.end() ? MPI_DATATYPE_NULL : found->second;
}

class MpiRank final : public System {
 public:
  MpiRank() {
    MPI_Comm_rank(kWorld, &rank_);
    MPI_Comm_size(kWorld, &size_);
  }
  int rank() const override { return rank_; }
  void barrier() override { MPI_Barrier(kWorld); }
  double slowest(double seconds) override {
    MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, kWorld);
    return seconds;
  }
  std::function<void()> prepare(const Case& one) override;

 private:
  int rank_ = 0;
  int size_ = 1;
  std::vector<char> input_;
  std::vector<char> output_;
};

std::function<void()> MpiRank::prepare(const Case& one) {
  const MPI_Datatype type = type_of(one.dtype);
  if (type == MPI_DATATYPE_NULL) return nullptr;  // the standard has no 16-bit floats
  int element = 0;
  MPI_Type_size(type, &element);
  const int count = static_cast<int>(one.count());
  const int part = static_cast<int>(one.part(size_));
  input_.assign(std::max(one.count(), one.whole(size_)) * element, 0);
  output_.assign(input_.size(), 0);
  void* const in = input_.data();
  void* const out = output_.data();
  const bool root = rank_ == 0;
  const int peer = 1 - rank_;
  const std::map<std::string, std::function<void()>> calls{
      {"barrier", [=] { MPI_Barrier(kWorld); }},
      {"all_reduce", [=] { MPI_Allreduce(MPI_IN_PLACE, in, count, type, MPI_SUM, kWorld); }},
      {"reduce", [=] { MPI_Reduce(root ? MPI_IN_PLACE : in, in, count, type, MPI_SUM, 0, kWorld); }},
      {"reduce_scatter", [=] { MPI_Reduce_scatter_block(in, out, part, type, MPI_SUM, kWorld); }},
      {"all_gather", [=] { MPI_Allgather(in, part, type, out, part, type, kWorld); }},
      {"broadcast", [=] { MPI_Bcast(in, count, type, 0, kWorld); }},
      {"gather", [=] { MPI_Gather(in, part, type, out, part, type, 0, kWorld); }},
      {"scatter", [=] { MPI_Scatter(in, part, type, out, part, type, 0, kWorld); }},
      {"all_to_all", [=] { MPI_Alltoall(in, part, type, out, part, type, kWorld); }},
      {"send_receive", there_and_back(
                           rank_, [=] { MPI_Send(in, count, type, peer, 0, kWorld); },
                           [=] { MPI_Recv(in, count, type, peer, 0, kWorld, MPI_STATUS_IGNORE); })},
  };
  const auto found = calls.find(one.operation);
  return found == calls.end() ? nullptr : found->second;
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  {
    lockstep::bench::MpiRank system;
    lockstep::bench::serve(system, argv[1]);
  }
  MPI_Finalize();
}
