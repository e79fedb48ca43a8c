// MPI_Allreduce of float32, in place: a line "bytes seconds" per size, median of the rounds of the slowest rank.
// Compiled by bench/collectives.py with each MPI's own mpicxx.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int kRounds = 9;

double measure(std::vector<float>& data, int count) {
  const int repeats = std::clamp((64 << 20) / (4 * count), 1, 2000);
  std::vector<double> rounds;
  for (int round = 0; round <= kRounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    for (int i = 0; i < repeats; ++i)
      MPI_Allreduce(MPI_IN_PLACE, data.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double seconds = (MPI_Wtime() - start) / repeats;
    MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (round > 0) rounds.push_back(seconds);  // the first warms up
    std::fill(data.begin(), data.begin() + count, 1e-3F);
  }
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::size_t max_bytes = std::strtoull(argv[1], nullptr, 10);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<float> data(max_bytes / 4, 1e-3F);
  for (std::size_t bytes = 4; bytes <= max_bytes; bytes *= 4) {
    const double seconds = measure(data, static_cast<int>(bytes / 4));
    if (rank == 0) std::printf("%zu %.9f\n", bytes, seconds);
  }
  MPI_Finalize();
}
