// SPDX-License-Identifier: Apache-2.0
// A prototype, no part of lockstep: an MLP's weights are updated where their gradient is made. docs/design/fused-step.md
// has what it measured.
//
//   update_in_backward [rounds] [rows of a tile]
//
// `one process` is PyTorch's own: autograd with a thread on each core, and the fused SGD. `tiles` has the same threads; for each tile
// of a weight's rows, while it is in the second-level cache: input gradient += of the tile, its weight gradient, its update.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <ATen/Parallel.h>

#include "bench/limits.h"
#include "bench/prototypes/mlp.h"

namespace lockstep::prototypes {
namespace {

class Tiles {
 public:
  explicit Tiles(int64_t rows) : rows_(rows), model_(make_model()) {}

  double step(const Tensor& data, const Tensor& target) {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> inputs = {data};
    for (size_t i = 0; i < model_.weights.size(); ++i) {
      Tensor x = torch::linear(inputs.back(), model_.weights[i], model_.biases[i]);
      if (i + 1 < model_.weights.size()) x.relu_();
      inputs.push_back(x);
    }
    double loss = 0;
    Tensor gradient = loss_gradient(inputs.back(), target, loss);
    for (size_t i = model_.weights.size(); i-- > 0;) {
      update(model_.biases[i], model_.bias_momenta[i], gradient.sum(0));
      Tensor before = layer(i, inputs[i], gradient);
      if (i > 0) gradient = before.mul_(inputs[i] > 0);
    }
    return loss;
  }
  const Model& model() const { return model_; }

 private:
  // Backward and update of one layer; returns the gradient of its input (no use for the first).
  Tensor layer(size_t i, const Tensor& input, const Tensor& gradient) {
    Tensor& weight = model_.weights[i];
    const int64_t columns = weight.size(1);
    const int threads = at::get_num_threads();
    const Tensor columns_first = gradient.t().contiguous();  // (out, B)
    std::vector<Tensor> of_threads(static_cast<size_t>(threads));
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      const torch::NoGradGuard no_grad;
      for (int64_t thread = begin; thread < end; ++thread) {
        Tensor mine = torch::zeros({kBatch, columns}), tile_gradient = torch::empty({rows_, columns});
        const int64_t share = (weight.size(0) + threads - 1) / threads;
        const int64_t last = std::min(weight.size(0), (thread + 1) * share);
        for (int64_t row = thread * share; row < last; row += rows_) {
          const int64_t rows = std::min(rows_, last - row);
          const Tensor tile = weight.narrow(0, row, rows), outer = columns_first.narrow(0, row, rows);
          if (i > 0) mine.addmm_(outer.t(), tile);
          Tensor made = tile_gradient.narrow(0, 0, rows);
          at::mm_out(made, outer, input);
          update(tile, model_.weight_momenta[i].narrow(0, row, rows), made);
        }
        of_threads[static_cast<size_t>(thread)] = mine;
      }
    });
    for (size_t t = 1; t < of_threads.size(); ++t) of_threads[0].add_(of_threads[t]);
    return of_threads[0];
  }

  int64_t rows_;
  Model model_;
};

// ---- Measuring

template <class System>
double median_ms(System& system, const Tensor& data, const Tensor& target, int steps, double& loss) {
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    loss = system.step(data, target);
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::ranges::nth_element(times, times.begin() + steps / 2);
  return times[static_cast<size_t>(steps / 2)];
}

}  // namespace
}  // namespace lockstep::prototypes

int main(int argc, char** argv) {
  using namespace lockstep::prototypes;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const int64_t rows = argc > 2 ? std::atoi(argv[2]) : 32;
  const auto [data, target] = make_samples();
  std::printf("%d threads; triad %.1f GB/s, sgemm %.0f GFLOP/s; K = %.1f MB\n", at::get_num_threads(),
              best_speed(lockstep::bench::Triad()) / 1e9, best_speed(lockstep::bench::Sgemm()) / 1e9,
              bytes_of_weights() / 1e6);
  OneProcess one;
  Tiles tiles(rows);
  std::vector<double> ratios;
  double loss_one = 0, loss_tiles = 0;
  for (int round = 0; round < rounds; ++round) {
    const double a = median_ms(one, data, target, 15, loss_one), b = median_ms(tiles, data, target, 15, loss_tiles);
    ratios.push_back(a / b);
    std::printf("round %d: one process %.1f ms, tiles of %ld rows %.1f ms: %.2f x; losses %.6f %.6f\n", round, a,
                static_cast<long>(rows), b, a / b, loss_one, loss_tiles);
  }
  double worst = 0;
  for (size_t i = 0; i < one.model().weights.size(); ++i)
    worst = std::max(worst, (one.model().weights[i].detach() - tiles.model().weights[i]).abs().max().item<double>());
  std::ranges::sort(ratios);
  std::printf("median %.2f x; the largest difference of a weight: %.1e\n", ratios[ratios.size() / 2], worst);
}
