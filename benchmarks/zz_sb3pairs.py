from benchmarks.evaluate import compare, cartpole_ours, cartpole_sb3
if __name__ == "__main__":
    print(compare("CartPole, Stable-Baselines3", cartpole_ours, cartpole_sb3, 10)); print("PAIRSDONE")
