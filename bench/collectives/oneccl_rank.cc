// SPDX-License-Identifier: Apache-2.0
// oneCCL, as one of the systems, for all_reduce: it calls MPICH, whose mpirun starts it. The build of PyPI for CPUs lacks
// libccl.so.2, so that it is laid over the one for GPUs:
//
//   export DEB_PYTHON_INSTALL_LAYOUT=deb
//   for package in oneccl oneccl-cpu oneccl-cpu-devel; do
//     python3 -m pip install --no-deps --no-compile --ignore-installed --prefix .deps/oneccl $package==2022.2.0
//   done
#include <mpi.h>
#include <oneapi/ccl.hpp>

#include <cstdlib>
#include <map>
#include <vector>

#include "bench/collectives/cases.h"

namespace lockstep::bench {
namespace {

const MPI_Comm kWorld = MPI_COMM_WORLD;

const std::map<std::string, ccl::datatype> kTypes{
    {"float32", ccl::datatype::float32},   {"float64", ccl::datatype::float64}, {"float16", ccl::datatype::float16},
    {"bfloat16", ccl::datatype::bfloat16}, {"int32", ccl::datatype::int32},     {"int64", ccl::datatype::int64},
    {"uint8", ccl::datatype::uint8}};

int rank_of_this() {
  int rank = 0;
  MPI_Comm_rank(kWorld, &rank);
  return rank;
}

// Rank 0 says where the ranks meet.
ccl::communicator meet(int rank) {
  int size = 1;
  MPI_Comm_size(kWorld, &size);
  ccl::shared_ptr_class<ccl::kvs> store;
  if (rank == 0) store = ccl::create_main_kvs();
  auto address = rank == 0 ? store->get_address() : ccl::kvs::address_type{};
  MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_CHAR, 0, kWorld);
  if (rank != 0) store = ccl::create_kvs(address);
  return ccl::create_communicator(size, rank, store);
}

class OneCclRank final : public System {
 public:
  int rank() const override { return rank_; }
  void barrier() override { MPI_Barrier(kWorld); }
  double slowest(double seconds) override {
    MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, kWorld);
    return seconds;
  }
  std::function<void()> prepare(const Case& one) override {
    if (one.operation != "all_reduce") return nullptr;
    const ccl::datatype type = kTypes.at(one.dtype);
    data_.assign(one.count() * ccl::get_datatype_size(type), 0);
    return [this, type, count = one.count(), data = data_.data()] {
      ccl::allreduce(data, data, count, type, ccl::reduction::sum, all_).wait();
    };
  }

 private:
  int rank_ = rank_of_this();
  ccl::communicator all_ = meet(rank_);
  std::vector<char> data_;
};

}  // namespace
}  // namespace lockstep::bench

// No thread beside each rank's own, which made small messages take 10 ms on two cores.
int main(int argc, char** argv) {
  ::setenv("CCL_ATL_TRANSPORT", "mpi", 0);
  ::setenv("CCL_WORKER_OFFLOAD", "0", 0);
  ::setenv("CCL_LOG_LEVEL", "error", 0);
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  ccl::init();
  {
    lockstep::bench::OneCclRank system;
    lockstep::bench::serve(system, argv[1]);
  }
  MPI_Finalize();
}
