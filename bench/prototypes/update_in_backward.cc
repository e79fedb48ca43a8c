// SPDX-License-Identifier: Apache-2.0
// A prototype, no part of lockstep: an MLP's weights are updated where their gradient is made. docs/design/fused-step.md
// has what it measured.
//
//   update_in_backward [rounds] [rows of a tile]
//
// `one process` is PyTorch's own: autograd with a thread on each core, and the fused SGD. `tiles` has the same threads; for each tile
// of a weight's rows, while it is in the second-level cache: input gradient += of the tile, its weight gradient, its update.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/_fused_sgd.h>
#include <torch/torch.h>

namespace {

using torch::Tensor;

constexpr double kRate = 0.01, kMomentum = 0.9;
constexpr int64_t kBatch = 32;
const std::vector<int64_t> kWidths = {1024, 4096, 4096, 1000};

struct Model {
  std::vector<Tensor> weights, biases, weight_momenta, bias_momenta;
};

Model make_model() {
  torch::manual_seed(1);
  Model model;
  for (size_t i = 1; i < kWidths.size(); ++i) {
    model.weights.push_back(torch::randn({kWidths[i], kWidths[i - 1]}) * 0.02);
    model.biases.push_back(torch::zeros({kWidths[i]}));
    model.weight_momenta.push_back(torch::zeros_like(model.weights.back()));
    model.bias_momenta.push_back(torch::zeros_like(model.biases.back()));
  }
  return model;
}

// ---- PyTorch's own way

class OneProcess {
 public:
  OneProcess() : model_(make_model()) {
    for (auto* list : {&model_.weights, &model_.biases})
      for (Tensor& each : *list) each.set_requires_grad(true);
  }

  double step(const Tensor& data, const Tensor& target) {
    Tensor x = data;
    for (size_t i = 0; i < model_.weights.size(); ++i) {
      x = torch::linear(x, model_.weights[i], model_.biases[i]);
      if (i + 1 < model_.weights.size()) x = x.relu();
    }
    const Tensor loss = torch::cross_entropy_loss(x, target);
    loss.backward();
    std::vector<Tensor> parameters, gradients, momenta;
    for (auto [values, buffers] :
         {std::pair(&model_.weights, &model_.weight_momenta), std::pair(&model_.biases, &model_.bias_momenta)})
      for (size_t i = 0; i < values->size(); ++i) {
        parameters.push_back((*values)[i]);
        gradients.push_back((*values)[i].grad());
        momenta.push_back((*buffers)[i]);
      }
    const torch::NoGradGuard no_grad;
    at::_fused_sgd_(parameters, gradients, momenta, 0, kMomentum, kRate, 0, false, false, false);
    for (Tensor& each : parameters) each.mutable_grad() = Tensor();
    return loss.item<double>();
  }
  const Model& model() const { return model_; }

 private:
  Model model_;
};

// ---- Update in backward

// p -= rate * (m = momentum * m + g), of one run of memory.
void update(float* p, float* m, const float* g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    m[i] = static_cast<float>(kMomentum) * m[i] + g[i];
    p[i] -= static_cast<float>(kRate) * m[i];
  }
}

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
    const Tensor log = inputs.back().log_softmax(1);
    const double loss = -log.gather(1, target.unsqueeze(1)).mean().item<double>();
    Tensor gradient = log.exp();
    gradient.scatter_add_(1, target.unsqueeze(1), torch::full({kBatch, 1}, -1.F));
    gradient.div_(kBatch);
    for (size_t i = model_.weights.size(); i-- > 0;) {
      const Tensor bias = gradient.sum(0);
      update(model_.biases[i].data_ptr<float>(), model_.bias_momenta[i].data_ptr<float>(), bias.data_ptr<float>(),
             bias.numel());
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
          update(tile.data_ptr<float>(), model_.weight_momenta[i].narrow(0, row, rows).data_ptr<float>(),
                 made.data_ptr<float>(), rows * columns);
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

// GB/s of a = b + s c over arrays that no cache holds, with all threads.
double triad() {
  constexpr int64_t kFloats = 32 << 20;
  Tensor a = torch::zeros({kFloats}), b = torch::ones({kFloats}), c = torch::ones({kFloats});
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    at::add_out(a, b, c, 3);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, 4.0 * 4 * kFloats / seconds / 1e9);  // with the read for ownership
  }
  return best;
}

double gflops() {
  Tensor a = torch::randn({1024, 1024}), b = torch::randn({1024, 1024}), c = torch::empty({1024, 1024});
  double best = 0;
  for (int i = 0; i < 10; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    at::mm_out(c, a, b);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, 2.0 * 1024 * 1024 * 1024 / seconds / 1e9);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const int64_t rows = argc > 2 ? std::atoi(argv[2]) : 32;
  torch::manual_seed(7);
  const Tensor data = torch::randn({kBatch, kWidths.front()}), target = torch::randint(0, kWidths.back(), {kBatch});
  int64_t bytes = 0;
  for (size_t i = 1; i < kWidths.size(); ++i) bytes += 4 * kWidths[i] * kWidths[i - 1];
  std::printf("%d threads; triad %.1f GB/s, sgemm %.0f GFLOP/s; K = %.1f MB\n", at::get_num_threads(), triad(),
              gflops(), bytes / 1e6);
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
